"""
Requests of nodes for ranks: accepted or refused, and whether the running round ends for them. Pure.

Rules of this file: a node that asks again keeps its record, and waits at the end. It has no worker
left, whatever it reported before. A newcomer is compared with the present nodes once. All nodes of
a job have the same terms, and those of one role the same work. Where each node has a fixed place,
it must be in range, and no other node may have it.
"""

from __future__ import annotations

from attrs import evolve

from elasticlib.rendezvous.coordinator import (
    _commands,
    _departures,
    _node_liveness,
    _places,
    _replacements,
    _round_end,
)
from elasticlib.rendezvous.coordinator._state import (
    Action,
    Entry,
    JobState,
    Outcome,
    Round,
    WakeAt,
    entry_of,
    present,
)
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._messages import Join, Terms
from elasticlib.rendezvous.protocol._shortening import line


def join(state: JobState, report: Join, seq: int, now: float) -> Outcome:
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


def _refusal(state: JobState, report: Join, entry: Entry) -> str | None:
    """
    Return why the node of *report*, with the new *entry*, may not take part in the job; None if it
    may.
    """
    return _of_terms(state, report) or _of_work(state, report) or _of_place(state, entry)


def _of_terms(state: JobState, report: Join) -> str | None:
    node, theirs, ours = report.node, report.terms, state.rules.terms
    if theirs is None or theirs == ours:
        return None
    difference = f"node {node} asks for {_terms(theirs)}, but this job runs with {_terms(ours)}"
    return f"{difference}: give all nodes the same numbers, or each job its own id (--rdzv-id)"


def _terms(terms: Terms) -> str:
    return f"{terms.min_nodes} to {terms.max_nodes} nodes and {terms.max_restarts} restarts"


def _of_work(state: JobState, report: Join) -> str | None:
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

    # `let_in_rested` lets a node in once its pause is over.
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


def let_in_rested(state: JobState, current: Round, now: float) -> Outcome:
    """Let in a newcomer whose pause is over; else ask to be woken at the end of the next pause."""
    for node in _places.rested(state, now):
        state, actions = _let_in(state, current, node)
        if actions:
            return state, actions
    wake = _places.next_free(state, now)
    if wake is None:
        return state, ()
    return state, (WakeAt(wake),)
