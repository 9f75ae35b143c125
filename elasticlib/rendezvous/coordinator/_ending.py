"""
How a round ends, and how the job does. Pure.

Rules of this file: nodes that left are told nothing; a node that waits for ranks has stopped its workers of the last
round, and hears only what caused its end, and how the job ended. Failures spend the job's restarts, arrivals and
leaves do not, and losses do when they repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._commands import final_for
from elasticlib.rendezvous.coordinator._state import MOST_NAMES, Cause, Outcome, Round, Send, State, host_of
from elasticlib.rendezvous.protocol._messages import Elaborate, Final, RoundEnd
from elasticlib.rendezvous.protocol._shortening import brief, line, place, short

LOSSES_IN_A_ROW = 3
"""Rounds that a host may be lost from, one after the other, until that is taken for a failure."""
REMEMBERED = 1024
"""Hosts whose losses are counted: the latest."""
WHOLE_CAUSES, MOST_CAUSES = 2, 16
"""Failures of a round that are kept: so many with all that was told of them, so many in all."""
ASKED_EARLY = 4
"""Nodes that are asked for all of a failure before it is certain that it is the root cause."""


def end_round(state: State, current: Round, why: str, *, restart: bool) -> Outcome:
    """Have every node of the running round stop its workers."""
    return stop_workers(state, current, RoundEnd(current.number, line(why), restart))


def stop_workers(state: State, current: Round, end: RoundEnd) -> Outcome:
    """End the round so on every node that may still have workers."""
    present = (entry for entry in current.entries.values() if entry.node not in current.left)
    told = (entry for entry in present if entry.node not in state.waiting)
    actions = tuple(Send(entry.mailbox, entry.node, end) for entry in told)
    return evolve(state, round=evolve(current, end=end)), actions


def spend(state: State, current: Round, why: str, *, fatal: bool = False) -> tuple[State, RoundEnd]:
    """The end of the round by a failure: with a restart if one is left, unless that would meet what is *fatal*."""
    allowed = state.rules.max_restarts
    restart = may_restart(state, fatal=fatal)
    if restart:
        state = evolve(state, restarts=state.restarts + 1)
        cost = f"restart {state.restarts} of {allowed}"
    elif fatal:
        cost = "a restart would fail again"
    else:
        cost = f"all {allowed} restarts are used" if allowed else "no restarts are allowed"
    return state, RoundEnd(current.number, line(f"{why}; {cost}"), restart)


def may_restart(state: State, *, fatal: bool) -> bool:
    """Whether a failure that is *fatal*, or not, costs a restart and does not end the job."""
    return not fatal and state.restarts < state.rules.max_restarts


def asks(state: State, current: Round, *, gone: bool) -> tuple[Outcome, bool]:
    """
    Have the root cause told whole by the node that has it; and whether that is still to come.

    Soon, as the node may be lost; but when thousands fail, each may for a moment be the first of those that are known.
    So most are asked only once all workers are *gone*.
    """
    root = root_cause(current.causes)
    if root is None or not root.note.cut or root.node in current.left:
        return (state, ()), False
    if root.node in current.asked:
        return (state, ()), True
    if len(current.asked) >= ASKED_EARLY and not gone:
        return (state, ()), True
    entry = state.waiting.get(root.node) or current.entries[root.node]
    state = evolve(state, round=evolve(current, asked=current.asked | {root.node}))
    return (state, (Send(entry.mailbox, entry.node, Elaborate(current.number)),)), True


def finish(state: State, final: Final) -> Outcome:
    """End the job: everybody who is still there is told *final*."""
    final = evolve(final, why=line(final.why))
    audience = dict(state.waiting)
    if state.round is not None:
        present = (entry for entry in state.round.entries.values() if entry.node not in state.round.left)
        for entry in present:
            audience.setdefault(entry.node, entry)
    actions = tuple(Send(entry.mailbox, entry.node, final_for(entry, final)) for entry in audience.values())
    return evolve(state, final=final), actions


def lose(state: State, current: Round, lost: Mapping[str, str]) -> tuple[State, RoundEnd]:
    """The end of the round because it lost nodes, given with the reasons."""
    what = "; ".join(f"node {node} is lost: {why}" for node, why in [*lost.items()][:MOST_NAMES])
    if len(lost) > MOST_NAMES:
        what += f"; and {len(lost) - MOST_NAMES} more nodes are lost"
    if not current.succeeded:
        host = max((host_of(node) for node in lost), key=lambda each: state.losses.get(each, 0))
        times = state.losses.get(host, 0) + 1
        if times >= LOSSES_IN_A_ROW:
            crashing = f"host {host} was lost in {times} rounds in a row before any worker succeeded"
            return spend(state, current, f"{what}; {crashing}")
    return state, RoundEnd(current.number, line(what), restart=True)


def losses_after(losses: Mapping[str, int], current: Round) -> Mapping[str, int]:
    """How many of its rounds running have lost each host, now that *current* is one of them."""
    if current.succeeded:
        return {}
    if not losses and not current.lost:
        return losses
    assigned = {host_of(node) for node in current.entries}
    elsewhere = {host: times for host, times in losses.items() if host not in assigned}
    after = elsewhere | {host: losses.get(host, 0) + 1 for host in sorted({host_of(node) for node in current.lost})}
    return dict(list(after.items())[-REMEMBERED:])


def root_cause(causes: Iterable[Cause]) -> Cause | None:
    """The failure that came first; a lost connection never beats another kind of failure."""
    return min(causes, key=_place, default=None)


def worth_keeping(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Those that are, or may turn out to be, the root cause: a bounded number of bytes, however many failed."""
    kept = sorted(causes, key=_place)[:MOST_CAUSES]
    return (*kept[:WHOLE_CAUSES], *(evolve(cause, note=short(cause.note)) for cause in kept[WHOLE_CAUSES:]))


def in_brief(state: State) -> State:
    """The same, with a few lines of the root cause and nothing of other failures."""
    current = state.round
    if current is not None and (root := root_cause(current.causes)) is not None:
        state = evolve(state, round=evolve(current, causes=(evolve(root, note=short(root.note)),)))
    return state if state.final is None else evolve(state, final=brief(state.final))


def _place(cause: Cause) -> tuple[bool, float, str, int]:
    return place(cause.note, -cause.at, cause.node)


def describe(root: Cause) -> str:
    """The failure that ended a round, for people."""
    note = root.note
    if note.process:
        return f"{line(note.message.strip())} on node {host_of(root.node)}"
    if note.fatal:
        return f"rank {note.rank} on node {host_of(root.node)} cannot go on ({line(note.message.strip())})"
    how = f"was ended by signal {-note.exitcode}" if note.exitcode < 0 else f"ended with exit status {note.exitcode}"
    # Without an exception the message of a signal only says so again.
    said = note.message.strip().splitlines() if note.exception_type or note.exitcode >= 0 else []
    return f"rank {note.rank} on node {host_of(root.node)} {how}" + (f" ({line(said[0])})" if said else "")


def tell_end(state: State, node: str, mailbox: str) -> tuple[Send, ...]:
    """How the job ended, if it has, for a *node* that waits there: its own outcome, or that it comes too late."""
    final, current = state.final, state.round
    if final is None:
        return ()
    if node not in state.waiting and (
        current is None or (node not in current.succeeded and node not in current.entries.keys() - current.left.keys())
    ):
        final = Final(False, f"the job had ended: {final.why}", kind="closed")
    return (Send(mailbox, node, final),)
