"""
How nodes ask for ranks, and whether the running round ends for them. Pure.

Rules of this file: a node that asks again keeps what is known of it, and waits at the end. It has no worker left,
whatever it reported before. Newcomers are compared with those who are there, once.
"""

from __future__ import annotations

from attrs import evolve

from elasticlib.rendezvous.coordinator import (
    _admission,
    _commands,
    _departures,
    _ending,
    _liveness,
    _places,
    _replacements,
)
from elasticlib.rendezvous.coordinator._state import Action, Entry, Outcome, Round, State, WakeAt, entry_of
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._messages import Join
from elasticlib.rendezvous.protocol._shortening import line


def join(state: State, report: Join, seq: int, now: float) -> Outcome:
    """Have the node of *report*, its message *seq*, wait for ranks, or refuse it."""
    node = report.node
    mailbox = mailbox_name(node, seq)
    state = _liveness.asks_anew(state, node)
    if state.final is not None:
        return state, _ending.tell_end(state, node, mailbox)
    entry = Entry(node, mailbox, seq, report.descriptor, came=now, arrived=now)
    known = entry_of(state, node)
    if known is not None:
        entry = _as_known(entry, known)
    why = _admission.refusal(state, report, entry)
    if known is None and not why:
        why = _places.refusal(state, entry, now) or _commands.refusal(state, entry)
    if why:
        return _departures.refuse(state, entry, why)
    cautions: tuple[Action, ...] = ()
    if known is None:
        state, entry = _places.arrived(state, entry, now)
        entry, cautions = _compare(state, entry, had_ranks=report.round >= 0)
    state = _ending.count_success(state, node, report.succeeded)
    state, actions = _let_wait(state, entry, now, report.after)
    return state, (*cautions, *actions)


def _as_known(entry: Entry, known: Entry) -> Entry:
    """Return the *entry* with the marks that the node has already."""
    return evolve(
        entry,
        arrived=known.arrived,
        exits=known.exits,
        free_at=known.free_at,
        is_other=known.is_other,
        is_replacement=known.is_replacement,
    )


def _compare(state: State, entry: Entry, *, had_ranks: bool) -> tuple[Entry, tuple[Action, ...]]:
    """Return the newcomer with its marks, and the cautions for people."""
    entry, of_commands = _commands.compared(state, entry, had_ranks=had_ranks)
    entry, of_replacements = _replacements.compared(state, entry)
    return entry, (*of_commands, *of_replacements)


def _let_wait(state: State, entry: Entry, now: float, why: str) -> Outcome:
    """Have a node wait for ranks, and end the running round if it is for that node."""
    node = entry.node
    waiting = dict(state.waiting)
    waiting.pop(node, None)  # a node that asks again waits at the end
    waiting[node] = entry
    state = evolve(state, waiting=waiting, last_join=now)
    current = state.round
    if current is None or node in current.succeeded:
        return state, ()
    if node in current.entries:
        return _rejoin(state, current, node, why)
    if current.end is not None:
        return state, ()
    is_pausing = entry.free_at > now
    return (state, ()) if is_pausing else _let_in(state, current, node)


def _rejoin(state: State, current: Round, node: str, why: str) -> Outcome:
    """Take a member that asks for ranks as stopped; *why* is how its sidecar ended, if it did."""
    text = f"node {node} joins again"
    rejoined = current.rejoined
    if why:
        text = f"{text}: {why}"
        rejoined = rejoined or line(text)
    current = evolve(current, stopped=current.stopped | {node}, rejoined=rejoined)
    state = evolve(state, round=current)
    if current.end is not None:
        return state, ()
    return _ending.end_round(state, current, text, restart=True)


def _let_in(state: State, current: Round, node: str) -> Outcome:
    """End the running round for a newcomer, if there is room."""
    is_full = len(current.entries) >= state.rules.max_nodes
    # Work that a node has finished is not thrown away: the newcomer waits for the end.
    if is_full or current.succeeded:
        return state, ()
    return _ending.end_round(state, current, f"node {node} joins", restart=True)


def let_in_rested(state: State, current: Round, now: float) -> Outcome:
    """Let in a newcomer whose pause is over; else say when the next pause will be."""
    for node in _places.rested(state, now):
        state, actions = _let_in(state, current, node)
        if actions:
            return state, actions
    wake = _places.next_free(state, now)
    if wake is None:
        return state, ()
    return state, (WakeAt(wake),)
