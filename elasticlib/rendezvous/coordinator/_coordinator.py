"""
Who is in a round, when it starts and ends and why, and how the job ends. Pure.

    gathering --finalize--> running --failure within budget, arrival, leave, loss--> gathering
                               |----all succeeded----------------------------------> over
                               '----failure, no budget--> closing --all stopped----> over

Rules of this file: `step` is a function of state, event and time; time is the coordinator's monotonic seconds. A
finalized round's rank assignments never change. Each decision says why. Messages that repeat, or that speak of an
older round, change nothing; a message that is missing ends the job, for nobody knows what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve
from typing_extensions import assert_never

from elasticlib.rendezvous.coordinator import (
    _admission,
    _causes,
    _commands,
    _ending,
    _liveness,
    _places,
    _replacements,
)
from elasticlib.rendezvous.coordinator._ending import tell_end
from elasticlib.rendezvous.coordinator._finalizing import gather, status
from elasticlib.rendezvous.coordinator._liveness import given_up, mailboxes, next_loss, read
from elasticlib.rendezvous.coordinator._state import (
    Action,
    Cause,
    Entry,
    Event,
    Heartbeats,
    Outcome,
    Received,
    Round,
    Send,
    State,
    WakeAt,
)
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._shortening import line

__all__ = ["abandon", "asks_again", "given_up", "mailboxes", "next_loss", "read", "status", "step", "tell_end"]

SILENT = "no heartbeat for {:g} s"
"""Why a node is lost whose heartbeats stay away."""


def step(state: State, event: Event, now: float) -> Outcome:
    """What *event* changes, and what to do about it; *now* never goes back."""
    actions: tuple[Action, ...] = ()
    if isinstance(event, Received):
        node, heard = event.report.node, state.heard.get(event.report.node, 0)
        if not heard and not isinstance(event.report, (messages.Join, messages.Close)):
            return _settle(state, now)  # a node that nobody knows any more: of thousands, the oldest are forgotten
        # Of a node that is not known, it may be forgotten that the messages before came; one whose sidecar ended asks
        # for ranks, or goes, with a number of its own.
        may_skip = isinstance(event.report, messages.Leave) or bool(getattr(event.report, "after", ""))
        if event.seq > heard + 1 and (heard or not state.has_forgotten) and not may_skip:
            state, actions = abandon(state, f"message {heard + 1} of node {node} is missing: {event.seq} came next")
        if event.seq > heard:
            state, more = _hear(evolve(state, heard={**state.heard, node: event.seq}), event, now)
            actions += more
        if not heard:  # also of those who are refused, or go again, while one round runs for days
            state = _places.forget_names(state)
    elif isinstance(event, Heartbeats):
        state, actions = _count(state, event.counts, now)
    state, more = _settle(state, now)
    return state, actions + more


def abandon(state: State, why: str, kind: str = "closed") -> Outcome:
    """End the job for everybody at once, without a failed worker as its cause."""
    return _ending.finish(state, messages.Final(False, why, kind=kind)) if state.final is None else (state, ())


def asks_again(state: State, node: str, mailbox: str, now: float) -> State:
    """
    A *node* that has *mailbox* still waits: for an answer that got lost, or it works in a former round.

    Whoever took the coordination over does not know whom the last one gave up: it listens to them.
    """
    return _liveness.listen_again(state, node, mailbox, now) if node in state.heard and state.final is None else state


def _hear(state: State, event: Received, now: float) -> Outcome:
    report = event.report
    if isinstance(report, messages.Join):
        return _join(state, report, event.seq, now)
    if state.final is not None or isinstance(report, messages.Acknowledgement):
        return state, ()
    if isinstance(report, messages.Close):
        return abandon(state, f"node {report.node} closed the job: {report.why}")
    if isinstance(report, messages.Leave):
        return _leave(state, report, now)
    current = state.round
    if current is None or report.round != current.number or report.node not in current.entries:
        return state, ()
    if report.node in current.succeeded and not _names_helpers_alone(report):
        return state, ()
    match report:
        case messages.Succeeded(node=node, round=number):
            return _count_success(state, node, number), ()
        case messages.Failed() | messages.Stopped():
            return _lose_workers(state, current, report, now)
    assert_never(report)


def _names_helpers_alone(report: messages.WorkerReport) -> bool:
    """Whether the report names only lost processes of elasticlib's own, such as the store that other nodes use."""
    if not isinstance(report, messages.Failed) or not report.failures:
        return False
    return all(note.process for note in report.failures)


def _count_success(state: State, node: str, number: int) -> State:
    current = state.round
    if current is None or current.number != number or node not in current.entries:
        return state
    succeeded, stopped = current.succeeded | {node}, current.stopped - {node}
    return evolve(state, round=evolve(current, succeeded=succeeded, stopped=stopped))


# Who comes.


def _join(state: State, report: messages.Join, seq: int, now: float) -> Outcome:
    node = report.node
    entry = Entry(node, mailbox_name(node, seq), seq, report.descriptor, came=now, arrived=now)
    state = _liveness.asks_anew(state, node)
    if state.final is not None:
        return state, tell_end(state, node, entry.mailbox)
    known = _known(state, node)
    if known is not None:
        entry = evolve(entry, arrived=known.arrived, exits=known.exits, free_at=known.free_at)
        entry = evolve(entry, is_other=known.is_other, is_replacement=known.is_replacement)
    refusal = _admission.refusal(state, report, entry)
    if known is None:
        refusal = refusal or _places.refusal(state, entry, now) or _commands.refusal(state, entry)
    if refusal:
        return _refuse(state, entry, refusal)
    cautions: tuple[Action, ...] = ()
    if known is None:
        state, entry = _places.arrived(state, entry, now)
        entry, cautions = _commands.compared(state, entry, had_ranks=report.round >= 0)
        entry, notes = _replacements.compared(state, entry)
        cautions += notes
    state, actions = _let_wait(_count_success(state, node, report.succeeded), entry, now, report.after)
    return state, (*cautions, *actions)


def _refuse(state: State, entry: Entry, why: str) -> Outcome:
    state, actions = _part(state, entry.node, why)
    return state, (Send(entry.mailbox, entry.node, messages.Final(False, why, kind="refused")), *actions)


def _let_wait(state: State, entry: Entry, now: float, why: str = "") -> Outcome:
    """A node waits for ranks, *why* if not for the first time; if there is room for it, the round that runs ends."""
    node, current = entry.node, state.round
    waiting = dict(state.waiting)
    waiting.pop(node, None)  # whoever asks again waits at the end
    waiting[node] = entry
    state = evolve(state, waiting=waiting, last_join=now)
    if current is None:
        return state, ()
    again = f"node {node} joins again{why and f': {why}'}"
    if node in current.entries and node not in current.succeeded:
        # A node that asks for ranks has no worker left, whatever it said before.
        rejoined = current.rejoined or (why and line(again))
        current = evolve(current, stopped=current.stopped | {node}, rejoined=rejoined)
        state = evolve(state, round=current)
    if current.end is not None or node in current.succeeded:
        return state, ()
    if node in current.entries:
        return _ending.end_round(state, current, again, restart=True)
    return (state, ()) if entry.free_at > now else _let_in(state, current, node)


def _let_in(state: State, current: Round, node: str) -> Outcome:
    """End the round that runs for a newcomer, if there is room."""
    # Work that a node has finished is not thrown away for an arrival: who comes then waits for the end.
    if len(current.entries) < state.rules.max_nodes and not current.succeeded:
        return _ending.end_round(state, current, f"node {node} joins", restart=True)
    return state, ()


def _known(state: State, node: str) -> Entry | None:
    """The node as it is there now; None for one that is not."""
    current = state.round
    assigned = current.entries.get(node) if current is not None and node not in current.left else None
    return state.waiting.get(node) or assigned


# Who goes.


def _leave(state: State, report: messages.Leave, now: float) -> Outcome:
    node, current = report.node, state.round
    entry = state.waiting.get(node)
    assigned = current is not None and node in current.entries
    if entry is None and current is not None and assigned and (node not in current.left or node in current.lost):
        entry = current.entries[node]
    still_runs = current is not None and assigned and report.round == current.number
    by_itself = not report.lost
    if entry is not None and by_itself and _disturbs(current, node):
        state = _places.left(state, entry, report.why, now)
    state, actions = _part(state, node, report.why, still_runs=still_runs, by_itself=by_itself)
    if entry is None:
        return state, actions
    final = messages.Final(False, f"node {node} left: {report.why}", kind="left")
    goodbye = Send(entry.mailbox, node, final)
    current = state.round
    at_work = current is not None and current.end is None and (not assigned or node in current.succeeded)
    closing = current is not None and current.end is not None and not current.end.restart
    nobody = not state.waiting and (current is None or len(current.left) == len(current.entries))
    if by_itself and nobody and not at_work and not closing:
        state, actions = _ending.finish(state, final)
    return state, (goodbye, *actions)


def _disturbs(current: Round | None, node: str) -> bool:
    """Whether others lose time because the node goes by itself."""
    if current is None:
        return True
    if current.succeeded or node in current.lost:
        return False
    return current.end is not None or node in current.entries


def _part(state: State, node: str, why: str, *, still_runs: bool = False, by_itself: bool = True) -> Outcome:
    """A node goes: strike it out; a round that runs with it ends."""
    if node in state.waiting:
        state = evolve(state, waiting={other: its for other, its in state.waiting.items() if other != node})
    current = state.round
    if current is None or node not in current.entries:
        return state, ()
    if not still_runs and node not in current.stopped and node not in current.succeeded:
        current = evolve(current, stopped=current.stopped | {node})
    known = node in current.left
    if not known:
        lost = current.lost if by_itself else current.lost | {node}
        current = evolve(current, left={**current.left, node: why}, lost=lost)
    state = evolve(state, round=current)
    if known or node in current.succeeded or current.end is not None:
        return state, ()
    if by_itself:
        return _ending.end_round(state, current, f"node {node} left: {why}", restart=True)
    return _end_for_losses(state, current, {node: why})


def _end_for_losses(state: State, current: Round, lost: Mapping[str, str]) -> Outcome:
    """End the running round because it lost nodes, given with the reasons."""
    state, end = _ending.lose(state, current, lost)
    return _ending.stop_workers(state, current, end)


def _count(state: State, counts: Mapping[str, int], now: float) -> Outcome:
    if state.final is not None or not state.rules.heartbeat:
        return state, ()
    state, back = _liveness.heard_again(state, counts)
    told = tuple(Send(mailbox, node, messages.GivenUp(SILENT.format(state.rules.heartbeat))) for node, mailbox in back)
    before = state
    state, silent = _liveness.look(state, counts, now)
    refused: tuple[Action, ...] = ()
    for node, why in _replacements.rejected(before, state, now).items():
        state, actions = _refuse(state, state.waiting[node], why)
        refused += actions
    state, actions = _lose(state, silent)
    return state, told + refused + actions


def _lose(state: State, silent: tuple[str, ...]) -> Outcome:
    current, why = state.round, SILENT.format(state.rules.heartbeat)
    if current is not None and (current.end is None or not current.end.restart):
        # A node that has succeeded owes nothing more to this round: its outcome waits for it.
        silent = tuple(node for node in silent if node in state.waiting or node not in current.succeeded)
    if not silent:
        return state, ()
    entries = [entry for node in silent if (entry := _known(state, node)) is not None]
    told = _tell_given_up(entries, why)
    waiting = {node: entry for node, entry in state.waiting.items() if node not in silent}
    state = evolve(_liveness.give_up(state, silent), waiting=waiting)
    if current is None:
        return state, told
    assigned = [node for node in silent if node in current.entries]
    gone = [node for node in assigned if node not in current.left]
    current = evolve(
        current,
        stopped=current.stopped.union(assigned) - current.succeeded,
        left={**current.left, **dict.fromkeys(gone, why)},
        lost=current.lost.union(gone),
    )
    state = evolve(state, round=current)
    missed = {node: why for node in gone if node not in current.succeeded}
    if not missed or current.end is not None:
        return state, told
    state, actions = _end_for_losses(state, current, missed)
    return state, told + actions


def _tell_given_up(entries: Iterable[Entry], why: str) -> tuple[Action, ...]:
    """At once, as they may live, and only their heartbeats be destroyed: they are heard when somebody lets them be."""
    return tuple(Send(entry.mailbox, entry.node, messages.GivenUp(why)) for entry in entries)


def _lose_workers(state: State, current: Round, report: messages.Failed | messages.Stopped, now: float) -> Outcome:
    causes = {(cause.node, cause.note.rank): cause for cause in current.causes}
    for note in report.failures:
        known = causes.get((report.node, note.rank))
        # The later note is the more complete one; the time of a failure is that of its first note.
        at = now - note.age if known is None else min(known.at, now - note.age)
        causes[report.node, note.rank] = Cause(at, report.node, note)
    found = tuple(causes.values())
    current = evolve(current, causes=_ending.worth_keeping(found))
    if isinstance(report, messages.Stopped):
        current = evolve(current, stopped=current.stopped | {report.node})
    state = evolve(state, round=current)
    if current.end is not None:
        return state, ()
    if isinstance(report, messages.Stopped) and not report.failures:
        return _ending.end_round(state, current, f"node {report.node} stopped its workers", restart=True)
    return _causes.end_for_failure(state, current, report.node, now)


# What follows.


def _settle(state: State, now: float) -> Outcome:
    """What the state itself calls for, whichever event led to it."""
    current = state.round
    if state.final is not None:
        return state, ()
    if current is None:
        return gather(state, now)
    if len(current.succeeded) == len(current.entries):
        why = f"all {len(current.entries)} nodes succeeded in round {current.number}"
        return _ending.finish(state, messages.Final(True, why, round=current.number))
    if current.end is None:
        return _look_at_pauses(state, current, now)
    # A node that left with workers at work is not waited for: it says nothing more of them.
    on_their_own = sum(node not in current.stopped and node not in current.succeeded for node in current.left)
    gone = len(current.stopped) + len(current.succeeded) + on_their_own == len(current.entries)
    state, told = _causes.decide(state, current, current.end, now, gone=gone)
    assert state.round is not None and state.round.end is not None
    go_on = gather(state, now) if state.round.end.restart else _close(state, state.round, state.round.end, gone=gone)
    state, actions = go_on
    return state, (*told, *_wake_sooner(state, actions, now))


def _close(state: State, current: Round, end: messages.RoundEnd, *, gone: bool) -> Outcome:
    """End the job, once no worker is left and the root cause is there whole."""
    (state, actions), more = _ending.asks(state, current, gone=gone)
    if more or not gone:
        return state, actions
    root = _ending.root_cause(current.causes)
    node, note = (root.node, root.note) if root else (None, None)
    return _ending.finish(state, messages.Final(False, end.why, node, note))


def _wake_sooner(state: State, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
    """With the time at which the cause of the round's end is due."""
    due = None if state.round is None or state.final is not None else state.round.cause_due
    if due is None or due <= now:
        return actions
    wakes = [action.when for action in actions if isinstance(action, WakeAt)]
    return (*(action for action in actions if not isinstance(action, WakeAt)), WakeAt(min([due, *wakes])))


def _look_at_pauses(state: State, current: Round, now: float) -> Outcome:
    """A newcomer whose pause is over is let in now."""
    for node in _places.rested(state, now):
        state, actions = _let_in(state, current, node)
        if actions:
            return state, actions
    wake = _places.next_free(state, now)
    return state, () if wake is None else (WakeAt(wake),)
