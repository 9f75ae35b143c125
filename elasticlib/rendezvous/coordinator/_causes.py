"""
The root cause of a round's end, and whether it uses a restart. Pure.

A worker's sockets close before its death can be seen. So peers on its node and on others often
report lost connections first. A round that fails therefore ends at once, and its cause is decided
when its workers are gone: by then every node has reported its failures, or is known to be lost.

Rules of this file: no restart is used before the cause is decided, and it is decided once. Workers
that stop slowly delay no decision: a failure that is more than a lost connection is the cause after
`CAUSE_WAIT`. If all failures are lost connections, and a node left, was lost or lost its sidecar
meanwhile, that node cut them. Then no restart is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from attrs import evolve

from elasticlib.errors import name_of_signal
from elasticlib.rendezvous.coordinator import _round_end
from elasticlib.rendezvous.coordinator._state import Cause, JobState, Outcome, Round, Send, host_of
from elasticlib.rendezvous.protocol._messages import Elaborate, Failed, RoundEnd, Stopped
from elasticlib.rendezvous.protocol._shortening import brief, line, place, short

CAUSE_WAIT = 1.0
"""Seconds in which nodes may report failures that came before the one that ended the round."""
WHOLE_CAUSES, MOST_CAUSES = 2, 16
"""Kept failures of a round: the number with all details, the number in all."""
EARLY_REQUESTS = 4
"""Nodes that must send all of a failure before it is certain that it is the root cause."""


def add_failures(state: JobState, current: Round, report: Failed | Stopped, now: float) -> Outcome:
    """Note the failures in a report; end the running round."""
    # Kept within bounds at each report: a handover holds all of them.
    current = evolve(current, causes=worth_keeping(_with_failures(current, report, now)))
    if isinstance(report, Stopped):
        current = evolve(current, stopped=current.stopped | {report.node})
    state = evolve(state, round=current)
    if current.end is not None:
        return state, ()

    if isinstance(report, Stopped) and not report.failures:
        why = f"node {report.node} stopped its workers"
        return _round_end.end_round(state, current, why, restart=True)

    return _end_for_failure(state, current, report.node, now)


def _with_failures(current: Round, report: Failed | Stopped, now: float) -> Collection[Cause]:
    """Return the known failures of the round, including those of *report*."""
    causes = {(cause.node, cause.note.rank): cause for cause in current.causes}
    for note in report.failures:
        known = causes.get((report.node, note.rank))
        # The later note is the more complete one; the time of a failure is that of its first note.
        at = now - note.age
        if known is not None:
            at = min(known.at, at)
        causes[report.node, note.rank] = Cause(at, report.node, note)
    return causes.values()


def _end_for_failure(state: JobState, current: Round, reporter: str, now: float) -> Outcome:
    """
    End the running round, before its cause is decided, because workers of the node *reporter*
    failed.
    """
    root = root_cause(current.causes)
    why = f"workers of node {reporter} failed" if root is None else describe(root)
    restart = _round_end.may_restart(state, fatal=is_fatal(current))
    # The first report is seldom the root cause: the end is announced at once, and its cause later.
    current = evolve(current, cause_due=now + CAUSE_WAIT)
    end = RoundEnd(current.number, line(why), restart, decided=False, failed=True)
    return _round_end.stop_workers(state, current, end)


def decide(state: JobState, current: Round, end: RoundEnd, now: float, *, gone: bool) -> Outcome:
    """Decide on the cause if it is time; report it if neither ranks nor the job's end will soon."""
    is_late = current.cause_due is not None and now >= current.cause_due
    if end.decided:
        decided = end
    elif _is_decidable(current, gone=gone, is_late=is_late):
        state, decided = _decided(state, current, end.why)
        current = evolve(current, end=decided)
        state = evolve(state, round=current)
    else:
        return state, ()

    # The nodes have a notice that the job ends, and must learn that it does not.
    is_reprieved = decided.restart and not end.restart
    if not is_late and not is_reprieved:
        # Ranks, or the end of the job, will soon report the cause.
        return state, ()

    state = evolve(state, round=evolve(current, cause_due=None))
    return state, _report_cause(state, current, decided)


def _report_cause(state: JobState, current: Round, end: RoundEnd) -> tuple[Send, ...]:
    actions = []
    for member in current.members():
        entry = state.waiting.get(member.node, member)
        actions.append(Send(entry.mailbox, entry.node, end))
    return tuple(actions)


def _is_decidable(current: Round, *, gone: bool, is_late: bool) -> bool:
    """Return whether no more report can change the cause."""
    if gone:
        return True
    # A lost connection has a cause, which a node that still stops may yet report.
    return is_late and not _are_lost_connections(current)


def _are_lost_connections(current: Round) -> bool:
    """Return whether all known failures are connections to peers that were lost."""
    return all(cause.note.secondary and not cause.note.fatal for cause in current.causes)


def _decided(state: JobState, current: Round, reported: str) -> tuple[JobState, RoundEnd]:
    """Return the end of the round with its cause; *reported* is the reason that was given first."""
    if current.causes and _are_lost_connections(current):
        cut = _cut_by_a_node(state, current)
        if cut is not None:
            return cut
    root = root_cause(current.causes)
    why = reported if root is None else describe(root)
    return _round_end.spend(state, current, why, fatal=is_fatal(current))


def _cut_by_a_node(state: JobState, current: Round) -> tuple[JobState, RoundEnd] | None:
    """Return the end of the round if connections were lost because a node is gone; else None."""
    unfinished = current.left.keys() - current.succeeded

    # A lost node comes first: a host that is lost again and again costs restarts, a node that leaves does not.
    lost = _reasons(current, current.lost & unfinished)
    if lost:
        return _round_end.lose(state, current, lost)

    left = _reasons(current, unfinished)
    if left:
        why = "; ".join(f"node {node} left: {reason}" for node, reason in left.items())
        return state, RoundEnd(current.number, line(why), restart=True)

    if current.rejoined:
        # The sidecar of a node ended, and all connections through it.
        return state, RoundEnd(current.number, current.rejoined, restart=True)

    return None


def _reasons(current: Round, nodes: Collection[str]) -> Mapping[str, str]:
    """Return the *nodes* in the order of ranks, each with the reason why it is gone."""
    return {node: current.left[node] for node in current.entries if node in nodes}


# The root cause.


def is_fatal(current: Round) -> bool:
    """Return whether a restart would only repeat one of the failures."""
    return any(cause.note.fatal for cause in current.causes)


def root_cause(causes: Iterable[Cause]) -> Cause | None:
    """Return the first failure; a lost connection never beats another kind of failure."""
    return min(causes, key=_place, default=None)


def worth_keeping(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return the failures that may be the root cause, in a bounded number of bytes."""
    kept = sorted(causes, key=_place)[:MOST_CAUSES]
    shortened = [_shortened(cause) for cause in kept[WHOLE_CAUSES:]]
    return (*kept[:WHOLE_CAUSES], *shortened)


def in_brief(state: JobState) -> JobState:
    """Return the state with a few lines of the root cause and without other failures."""
    current = state.round
    root = None if current is None else root_cause(current.causes)
    if current is not None and root is not None:
        state = evolve(state, round=evolve(current, causes=(_shortened(root),)))
    if state.final is not None:
        state = evolve(state, final=brief(state.final))
    return state


def _shortened(cause: Cause) -> Cause:
    return evolve(cause, note=short(cause.note))


def _place(cause: Cause) -> tuple[bool, float, str, int]:
    return place(cause.note, -cause.at, cause.node)


def _signal_text(number: int) -> str:
    """Return ``SIGKILL (signal 9)``, or ``signal 35`` for a signal without a name."""
    name = name_of_signal(number)
    return name if name.endswith(f" {number}") else f"{name} (signal {number})"


def describe(root: Cause) -> str:
    """Describe the failure that ended a round, for people."""
    note = root.note
    message = note.message.strip()
    host = host_of(root.node)
    if note.process:
        return f"{line(message)} on node {host}"
    if note.fatal:
        return f"rank {note.rank} on node {host} cannot continue ({line(message)})"

    has_signal = note.exitcode < 0
    if has_signal:
        how = f"was ended by {_signal_text(-note.exitcode)}"
    else:
        how = f"ended with exit status {note.exitcode}"

    text = f"rank {note.rank} on node {host} {how}"

    # Without an exception the message of a signal only repeats the signal.
    is_repetition = has_signal and not note.exception_type
    if is_repetition or not message:
        return text

    return f"{text} ({line(message.splitlines()[0])})"


# The whole root cause.


def request_whole_cause(state: JobState, current: Round, *, gone: bool) -> tuple[Outcome, bool]:
    """
    Request all of the root cause from its node, and return whether it is still incomplete.

    The request is sent soon, as the node may be lost. But when thousands of nodes fail, each of them
    may for a moment be the first known one. So most get it only once all workers are *gone*.
    """
    root = root_cause(current.causes)
    if root is None or not _is_incomplete(current, root):
        return (state, ()), False
    if root.node in current.requested:
        # Its answer is under way.
        return (state, ()), True

    is_too_early = len(current.requested) >= EARLY_REQUESTS and not gone
    if is_too_early:
        # It may yet turn out not to be the first failure.
        return (state, ()), True

    return _request_rest(state, current, root.node), True


def _request_rest(state: JobState, current: Round, node: str) -> Outcome:
    entry = state.waiting.get(node) or current.entries[node]
    state = evolve(state, round=evolve(current, requested=current.requested | {node}))
    return state, (Send(entry.mailbox, node, Elaborate(current.number)),)


def _is_incomplete(current: Round, root: Cause) -> bool:
    """Return whether only a part of the failure is known, and its node can send the rest."""
    return root.note.cut and root.node not in current.left
