"""
The coordinator's decisions: who is in a round, when and why it starts and ends, and how the job
ends. Pure.

    gathering --finalize--> running --failure within budget, arrival, leave, loss--> gathering
                               |----all succeeded----------------------------------> over
                               '----failure, no budget--> closing --all stopped----> over

Rules of this file: `step` is a function of state, event and time; time is the coordinator's
monotonic seconds. The rank assignments of a finalized round never change. Each decision has a
reason. Messages that repeat, or that belong to an older round, change nothing. A missing message
ends the job, because its content is unknown.

A newcomer is compared with the present nodes once. All nodes of a job have the same terms, and those
of one role the same work. Where each node has a fixed place, it must be in range, and no other node
may have it.
"""

from __future__ import annotations

from attrs import evolve
from typing_extensions import assert_never

from elasticlib.rendezvous.coordinator import (
    _causes,
    _commands,
    _common_stop,
    _departures,
    _node_liveness,
    _places,
    _replacements,
    _round_end,
)
from elasticlib.rendezvous.coordinator._finalizing import gather, status
from elasticlib.rendezvous.coordinator._node_liveness import given_up, mailboxes, next_loss, presences, read
from elasticlib.rendezvous.coordinator._round_end import send_end
from elasticlib.rendezvous.coordinator._state import (
    Action,
    Entry,
    Event,
    Heartbeats,
    JobState,
    MessageReceived,
    Outcome,
    Round,
    WakeAt,
    entry_of,
    present,
)
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._shortening import line

__all__ = [
    "abandon",
    "asks_again",
    "given_up",
    "mailboxes",
    "next_loss",
    "presences",
    "read",
    "send_end",
    "status",
    "step",
]


def step(state: JobState, event: Event, now: float) -> Outcome:
    """Return the state after *event*, and the actions that follow; *now* never goes back."""
    actions: tuple[Action, ...] = ()
    if isinstance(event, MessageReceived):
        state, actions = _receive(state, event, now)
    elif isinstance(event, Heartbeats):
        state, actions = _departures.note_heartbeats(state, event.counts, now)
    state, more = _settle(state, now)
    return state, actions + more


def abandon(state: JobState, why: str, kind: str = "closed") -> Outcome:
    """End the job for all nodes at once, without a failed worker as its cause."""
    # The first end counts.
    if state.final is not None:
        return state, ()
    return _round_end.finish(state, messages.Final(False, why, kind=kind))


def asks_again(state: JobState, node: str, mailbox: str, now: float) -> JobState:
    """
    Note that *node*, which has *mailbox*, still waits: its answer got lost, or it works in an
    earlier round.

    A coordinator that took over does not know which nodes the last one gave up: it listens to them.
    """
    if node not in state.received or state.final is not None:
        return state
    return _node_liveness.listen_again(state, node, mailbox, now)


# Messages.


def _receive(state: JobState, event: MessageReceived, now: float) -> Outcome:
    """Handle a message, unless it repeats an earlier one."""
    report = event.report
    received = state.received.get(report.node, 0)
    is_unknown = received == 0
    if is_unknown and not isinstance(report, (messages.Join, messages.Close)):
        # The node is unknown by now: of thousands that are gone, the oldest are forgotten.
        return state, ()

    actions: tuple[Action, ...] = ()
    if _is_one_missing(state, event, received):
        missing = f"message {received + 1} of node {report.node} is missing: {event.seq} came next"
        state, actions = abandon(state, missing)

    # A message that repeats an earlier one changes nothing.
    if event.seq > received:
        state = evolve(state, received={**state.received, report.node: event.seq})
        state, more = _act_on(state, event, now)
        actions += more

    if is_unknown:
        # At each first message, as nodes are also refused, or leave again, while one round runs for days.
        state = _places.forget_names(state)

    return state, actions


def _is_one_missing(state: JobState, event: MessageReceived, received: int) -> bool:
    """Return whether a message of the node got lost before this one; *received* is its last number."""
    if event.seq <= received + 1:
        return False
    if received == 0 and state.has_forgotten:
        # Its earlier messages may have come, and be forgotten.
        return False

    # A node whose sidecar ended leaves, or asks for ranks, with a number of its own.
    report = event.report
    if isinstance(report, messages.Leave):
        return False

    has_new_sidecar = isinstance(report, messages.Join) and report.after != ""
    return not has_new_sidecar


def _act_on(state: JobState, event: MessageReceived, now: float) -> Outcome:
    report = event.report
    if isinstance(report, messages.Join):
        return _join(state, report, event.seq, now)
    if state.final is not None:
        # Once the job has ended, only a node that waits for an answer gets one.
        return state, ()

    match report:
        case messages.Acknowledgement():
            # The server takes note: it waits no more for this node.
            return state, ()
        case messages.Close(stops=True) | messages.Leave(stops=True):
            return abandon(state, report.why, "stopped")
        case messages.Close():
            return abandon(state, f"node {report.node} closed the job: {report.why}")
        case messages.Leave():
            return _departures.leave(state, report, now)
        case messages.Succeeded() | messages.Failed() | messages.Stopped():
            return _hear_of_workers(state, report, now)
        case messages.StopWanted() | messages.CallsCounted():
            return _hear_of_stop(state, report)

    assert_never(report)


def _hear_of_workers(
    state: JobState, report: messages.Succeeded | messages.Failed | messages.Stopped, now: float
) -> Outcome:
    current = _round_of(state, report)
    if current is None:
        return state, ()
    if isinstance(report, messages.Succeeded):
        return _round_end.count_success(state, report.node, report.round), ()

    # Workers that have succeeded cannot fail any more, but a helper of their node can, which others
    # use.
    has_succeeded = report.node in current.succeeded
    if has_succeeded and not _names_helpers_alone(report):
        return state, ()

    return _causes.add_failures(state, current, report, now)


def _hear_of_stop(state: JobState, report: messages.StopWanted | messages.CallsCounted) -> Outcome:
    current = _round_of(state, report)
    if current is None:
        return state, ()
    if isinstance(report, messages.StopWanted):
        return _common_stop.ask(state, current, report)
    return _common_stop.count(state, current, report)


def _round_of(state: JobState, report: messages.WorkerReport) -> Round | None:
    current = state.round
    if current is None or report.round != current.number:
        return None
    return current if report.node in current.entries else None


def _names_helpers_alone(report: messages.WorkerReport) -> bool:
    """Return whether the report names only helper processes, such as the store that other nodes use."""
    if not isinstance(report, messages.Failed):
        return False
    # A failure without notes names no process.
    return bool(report.failures) and all(note.process for note in report.failures)


# Consequences.


def _settle(state: JobState, now: float) -> Outcome:
    """Do the actions that the state requires, after any event."""
    current = state.round
    if state.final is not None:
        return state, ()
    if current is None:
        return gather(state, now)

    # A node that left after its success counts, too.
    if len(current.succeeded) == len(current.entries):
        why = f"all {len(current.entries)} nodes succeeded in round {current.number}"
        return _round_end.finish(state, messages.Final(True, why, round=current.number))

    if current.end is None:
        return _settle_running(state, current, now)

    return _settle_ended(state, current, current.end, now)


def _settle_running(state: JobState, current: Round, now: float) -> Outcome:
    state, agreed = _common_stop.settle(state, current)
    assert state.round is not None
    state, actions = _let_in_rested(state, state.round, now)
    return state, (*agreed, *actions)


def _settle_ended(state: JobState, current: Round, end: messages.RoundEnd, now: float) -> Outcome:
    """Decide why the round ended, and begin the next one, or close the job."""
    gone = _are_workers_gone(current)
    state, reports = _causes.decide(state, current, end, now, gone=gone)

    # The cause may have turned a restart into the end of the job, or the reverse.
    decided = state.round
    assert decided is not None and decided.end is not None
    if decided.end.restart:
        state, actions = gather(state, now)
    else:
        state, actions = _close(state, decided, decided.end, gone=gone)

    due = _cause_due(state, now)
    if due is not None:
        actions = _wake_by(due, actions)
    return state, (*reports, *actions)


def _are_workers_gone(current: Round) -> bool:
    """Return whether no node will report anything more about the round's workers."""
    # A node that left with running workers is not waited for: it reports nothing more about them.
    unreported = sum(current.may_run_on(node) for node in current.left)
    return len(current.stopped) + len(current.succeeded) + unreported == len(current.entries)


def _close(state: JobState, current: Round, end: messages.RoundEnd, *, gone: bool) -> Outcome:
    """End the job, once no worker is left and all of the root cause is known."""
    (state, actions), is_incomplete = _causes.request_whole_cause(state, current, gone=gone)
    if is_incomplete or not gone:
        return state, actions
    final = messages.Final(False, end.why)
    root = _causes.root_cause(current.causes)
    if root is not None:
        final = evolve(final, root_node=root.node, root=root.note)
    return _round_end.finish(state, final)


def _cause_due(state: JobState, now: float) -> float | None:
    """Return when the cause of the round's end must be decided; None if no time limit applies."""
    if state.final is not None or state.round is None:
        return None
    due = state.round.cause_due
    if due is None or due <= now:
        # It is decided, or the last report that it waits for decides it.
        return None
    return due


def _wake_by(due: float, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return the *actions* with one `WakeAt`, at *due* or earlier."""
    # The shell keeps the last `WakeAt` of a step only.
    wakes = [action.when for action in actions if isinstance(action, WakeAt)]
    others = [action for action in actions if not isinstance(action, WakeAt)]
    return (*others, WakeAt(min([due, *wakes])))


# Requests for ranks. A node that asks again keeps its record, and waits at the end: it has no worker
# left, whatever it reported before.


def _join(state: JobState, report: messages.Join, seq: int, now: float) -> Outcome:
    """Add the node of *report*, its message *seq*, to the waiting nodes, or refuse it."""
    node = report.node
    mailbox = mailbox_name(node, seq)
    state = _node_liveness.asks_anew(state, node)
    if state.final is not None:
        return state, _round_end.send_end(state, node, mailbox)

    entry = Entry(node, mailbox, seq, report.descriptor, requested_at=now, arrived=now)
    known = entry_of(state, node)
    if known is not None:
        entry = _as_known(entry, known)
    # A node that is known was compared when it came: it keeps its marks, and is not warned of again.
    is_newcomer = known is None
    why = _refusal(state, report, entry)
    if is_newcomer and not why:
        why = _places.refusal(state, entry, now) or _commands.refusal(state, entry)
    if why:
        return _departures.refuse(state, entry, why)

    cautions: tuple[Action, ...] = ()
    if is_newcomer:
        state, entry = _places.arrived(state, entry, now)
        entry, cautions = _compare(state, entry, had_ranks=report.round >= 0)

    # Its report of the success may be lost with its sidecar: the request to join repeats it.
    state = _round_end.count_success(state, node, report.succeeded)
    state, actions = _let_wait(state, entry, now, report.after)
    return state, (*cautions, *actions)


# Refusals.


def _refusal(state: JobState, report: messages.Join, entry: Entry) -> str | None:
    """
    Return why the node of *report*, with the new *entry*, may not take part in the job; None if it
    may.
    """
    return _of_terms(state, report) or _of_work(state, report) or _of_place(state, entry)


def _of_terms(state: JobState, report: messages.Join) -> str | None:
    node, theirs, ours = report.node, report.terms, state.rules.terms
    if theirs is None or theirs == ours:
        return None
    difference = f"node {node} asks for {_terms(theirs)}, but this job runs with {_terms(ours)}"
    return f"{difference}: give all nodes the same numbers, or each job its own id (--rdzv-id)"


def _terms(terms: messages.Terms) -> str:
    return f"{terms.min_nodes} to {terms.max_nodes} nodes and {terms.max_restarts} restarts"


def _of_work(state: JobState, report: messages.Join) -> str | None:
    role, work = report.descriptor.role, report.descriptor.work
    peer = _peer_with_work(state, role)
    # Unknown work equals any other.
    if peer is None or work in ("", peer.descriptor.work):
        return None
    return (
        f"node {report.node} runs {work!r}, but node {peer.node} of this job runs {peer.descriptor.work!r} "
        f"in the same role {role!r}: if these are two jobs, give each its own id (--rdzv-id)"
    )


def _peer_with_work(state: JobState, role: str) -> Entry | None:
    """
    Return a node of the *role* whose work is known; one is enough, as each was compared when it
    came.
    """
    for entry in present(state):
        if entry.descriptor.role == role and entry.descriptor.work:
            return entry
    return None


def _of_place(state: JobState, entry: Entry) -> str | None:
    rules, node, index = state.rules, entry.node, entry.descriptor.index
    if not rules.fixed_places:
        return None

    places = f"0 to {rules.max_nodes - 1}"
    if index is None:
        return f"node {node} has no node rank, and each node of this job needs one: give --node-rank, from {places}"
    if index >= rules.max_nodes:
        return f"node rank {index} of node {node} is out of range: {rules.max_nodes} nodes have the ranks {places}"

    other = _replacements.holder(state, entry)

    # A dead node is often started again before its loss is known: the new one waits for that
    # instead.
    if other is None or _replacements.may_replace(state, entry, other):
        return None

    return _replacements.refusal(entry, other)


# Waiting nodes.


def _as_known(entry: Entry, known: Entry) -> Entry:
    return evolve(
        entry,
        arrived=known.arrived,
        exits=known.exits,
        free_at=known.free_at,
        is_other=known.is_other,
        is_replacement=known.is_replacement,
    )


def _compare(state: JobState, entry: Entry, *, had_ranks: bool) -> tuple[Entry, tuple[Action, ...]]:
    entry, of_commands = _commands.compared(state, entry, had_ranks=had_ranks)
    entry, of_replacements = _replacements.compared(state, entry)
    return entry, (*of_commands, *of_replacements)


def _let_wait(state: JobState, entry: Entry, now: float, why: str) -> Outcome:
    """Add a node to the waiting nodes, and end the running round if that lets the node in."""
    node = entry.node
    waiting = dict(state.waiting)

    # A node that asks again waits at the end.
    waiting.pop(node, None)
    waiting[node] = entry
    state = evolve(state, waiting=waiting, last_join=now)
    current = state.round

    # A node that has succeeded in this round waits for the next one, without any effect on others.
    if current is None or node in current.succeeded:
        return state, ()
    if node in current.entries:
        return _rejoin(state, current, node, why)
    if current.end is not None:
        return state, ()

    # `_let_in_rested` lets a node in once its pause is over.
    is_pausing = entry.free_at > now
    if is_pausing:
        return state, ()

    return _let_in(state, current, node)


def _rejoin(state: JobState, current: Round, node: str, why: str) -> Outcome:
    """Count a member that asks for ranks as stopped; *why* is how its sidecar ended, if it did."""
    text = f"node {node} joins again"
    rejoined = current.rejoined
    if why:
        text = f"{text}: {why}"
        # The first one counts, as with failures.
        rejoined = rejoined or line(text)

    current = evolve(current, stopped=current.stopped | {node}, rejoined=rejoined)
    state = evolve(state, round=current)
    if current.end is not None:
        return state, ()

    return _round_end.end_round(state, current, text, restart=True)


def _let_in(state: JobState, current: Round, node: str) -> Outcome:
    """End the running round for a newcomer, if there is room."""
    is_full = len(current.entries) >= state.rules.max_nodes
    # Work that a node has finished is not thrown away: the newcomer waits for the end.
    if is_full or current.succeeded:
        return state, ()
    return _round_end.end_round(state, current, f"node {node} joins", restart=True)


def _let_in_rested(state: JobState, current: Round, now: float) -> Outcome:
    """Let in a newcomer whose pause is over; else ask to be woken at the end of the next pause."""
    for node in _places.rested(state, now):
        state, actions = _let_in(state, current, node)
        if actions:
            return state, actions
    wake = _places.next_free(state, now)
    if wake is None:
        return state, ()
    return state, (WakeAt(wake),)
