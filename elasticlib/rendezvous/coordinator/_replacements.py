"""
Nodes that ask for the place of a node that may be dead, where each node has a fixed place. Pure.

Dead pods and agents are often started again before their death is known. So a node that asks for an
occupied place waits for it if it may be the replacement. That is so if it comes from the same host,
or if its scheduler gave it the number.

Rules of this file: a replacement gets ranks once the node before it is lost, or has left. It is
refused if that node is heard meanwhile, as the place was given twice. Without heartbeats no node is
a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._node_liveness import was_away
from elasticlib.rendezvous.coordinator._state import Action, Entry, JobState, Send, host_of
from elasticlib.rendezvous.protocol._messages import Caution

PATIENCE = 0.5
"""
Share of the heartbeat time after which heartbeats that are read were sent after the replacement
came.
"""


def holder(state: JobState, entry: Entry) -> Entry | None:
    """Return the other node that has the place of *entry*, or claimed it before; None if there is none."""
    for other in _by_claim(state):
        if other.descriptor.index == entry.descriptor.index:
            return None if other.node == entry.node else other
    return None


def _by_claim(state: JobState) -> Iterator[Entry]:
    """Yield the nodes in the order in which they may claim a place: replacements last."""
    if state.round is not None:
        yield from state.round.members()
    # Sorting is stable: among each kind the one that came first claims first.
    yield from sorted(state.waiting.values(), key=lambda entry: entry.is_replacement)


def may_replace(state: JobState, entry: Entry, other: Entry) -> bool:
    """Return whether the node of *entry* may be *other*, started again."""
    same_host = host_of(entry.node) == host_of(other.node)
    return state.rules.heartbeat > 0 and (same_host or entry.descriptor.is_scheduled)


def refusal(entry: Entry, other: Entry) -> str:
    """Return why the node of *entry* does not get the place that *other* has."""
    index = entry.descriptor.index
    return f"node rank {index} was given twice: node {other.node} has it, and node {entry.node} asks for it"


def compared(state: JobState, entry: Entry) -> tuple[Entry, tuple[Action, ...]]:
    """Return the entry to remember, with a caution if the node must wait for another one's end."""
    other = holder(state, entry) if state.rules.fixed_places else None
    if other is None:
        return entry, ()
    text = (
        f"node rank {entry.descriptor.index} belongs to node {other.node}: node {entry.node} waits, takes its place "
        f"once it sent no heartbeat for {state.rules.heartbeat:g} s, and is refused if it is alive"
    )
    return evolve(entry, is_replacement=True), (Send(entry.mailbox, entry.node, Caution(text)),)


def without_replacements(state: JobState, there: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return the nodes of *there* whose place no other node has."""
    # The usual case, without a look at each place.
    if not any(entry.is_replacement for entry in there.values()):
        return there

    def is_free(entry: Entry) -> bool:
        return not entry.is_replacement or holder(state, entry) is None

    return {node: entry for node, entry in there.items() if is_free(entry)}


def rejected(before: JobState, state: JobState, now: float) -> Mapping[str, str]:
    """
    Return the replacements whose places belong to nodes that were heard since *before*, each with
    the reason.
    """
    if was_away(before, now):
        # A heartbeat read now may have been sent long ago, by a node that has died since.
        return {}
    reasons = {}
    for entry in _long_waiting(state, now):
        other = holder(state, entry)
        if other is not None and _sent_heartbeat(before, state, other):
            reasons[entry.node] = refusal(entry, other)
    return reasons


def _long_waiting(state: JobState, now: float) -> list[Entry]:
    """Return the replacements that arrived before any heartbeat was sent that is read now."""
    due = now - PATIENCE * state.rules.heartbeat
    return [entry for entry in state.waiting.values() if entry.is_replacement and entry.requested_at <= due]


def _sent_heartbeat(before: JobState, state: JobState, entry: Entry) -> bool:
    """Return whether a heartbeat of the node was read since *before*, and not for the first time."""
    old = before.watch.sightings.get(entry.node)
    new = state.watch.sightings.get(entry.node)
    if old is None or new is None:
        return False
    # The first heartbeat of a mailbox may have lain there for long.
    is_first = old.mailbox != new.mailbox or old.count is None
    return not is_first and old.is_before(new.count)
