"""
Nodes that are silent, and the sockets that show their end earlier. Pure.

Rules of this file: counters are compared, never clocks of two hosts. A node whose count grows
lives; the coordinator measures with its own clock how long it has not grown. A count lower than
before is an old heartbeat that somebody has written again. A coordinator that did not look for a
while was paused, or is new: it blames no node for what it missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Entry, JobState, Presence, Sighting
from elasticlib.rendezvous.protocol._heartbeats_read import HeartbeatsRead

MISSED = 0.45
"""
Share of the heartbeat time without a heartbeat after which a node's heartbeats are missed.

Between two heartbeats lie 0.25 of it, and the coordinator looks after each 0.1.
"""
REMEMBERED = 64
"""Nodes that were given up and are still listened to."""


def mailboxes(state: JobState) -> Mapping[str, str]:
    """
    Return the mailbox of each node whose heartbeats count.

    These are all that wait or are in the round, except lost ones. A node that leaves counts until
    its workers are gone.
    """
    return {node: entry.mailbox for node, entry in _watched(state).items()}


def _watched(state: JobState) -> Mapping[str, Entry]:
    found = dict(state.waiting)
    current = state.round
    if current is None:
        return found

    for node, entry in current.entries.items():
        # A node that leaves counts until it reports that its workers are gone: they delay the next
        # round.
        if node not in current.left or current.may_run_on(node):
            # A node that waits sends heartbeats in its newer mailbox.
            found.setdefault(node, entry)

    return found


def presences(state: JobState) -> tuple[Presence, ...]:
    """Return the presence sockets of the nodes whose heartbeats count."""
    entries = _watched(state).values()
    offers = ((entry.node, entry.descriptor) for entry in entries)
    return tuple(
        Presence(node, offer.presence_address or offer.addresses[0], offer.presence_port)
        for node, offer in offers
        if offer.presence_port
    )


def given_up(state: JobState) -> Mapping[str, str]:
    """Return the mailbox of each node that was lost, and gets a `GivenUp` if it is heard again."""
    return {node: sighting.mailbox for node, sighting in state.watch.given_up.items()}


def look(state: JobState, counts: Mapping[str, int], now: float) -> tuple[JobState, tuple[str, ...]]:
    """Note the heartbeats, and return the nodes that were silent for longer than they may be."""
    timeout = state.rules.heartbeat
    looks_late = was_away(state, now)
    sightings: dict[str, Sighting] = {}
    silent = []
    for node, entry in _watched(state).items():
        sighting = _last_sighting(state, entry)
        if sighting is None:
            # Its request to join is its first sign of life.
            sighting = Sighting(entry.mailbox, None, entry.requested_at)

        count = counts.get(entry.mailbox)
        if sighting.is_before(count):
            sighting = Sighting(entry.mailbox, count, now)
        elif looks_late:
            # The node may have sent heartbeats that were not read: its time begins again.
            sighting = evolve(sighting, at=now)
        elif now - sighting.at >= timeout:
            silent.append(node)

        sightings[node] = sighting

    return evolve(state, watch=evolve(state.watch, sightings=sightings, at=now)), tuple(silent)


def _last_sighting(state: JobState, entry: Entry) -> Sighting | None:
    """Return the last heartbeat of the node in its present mailbox; None if none is known there."""
    sighting = state.watch.sightings.get(entry.node)
    # Each request opens a new mailbox, whose heartbeats count from 0 again.
    if sighting is None or sighting.mailbox != entry.mailbox:
        return None
    return sighting


def was_away(state: JobState, now: float) -> bool:
    """Return whether the coordinator has not looked at heartbeats for a while."""
    last = state.watch.at
    # Looks are a tenth of the heartbeat time apart: half of it means that this process stood still.
    return last is None or now - last > state.rules.heartbeat / 2


def give_up(state: JobState, silent: Iterable[str]) -> JobState:
    """Mark the *silent* nodes as lost; keep listening, in case they are heard again."""
    return _listen(state, {node: state.watch.sightings[node] for node in silent})


def listen_again(state: JobState, node: str, mailbox: str, now: float) -> JobState:
    """Listen to a *node* that has no part in the job any more, to send it a `GivenUp`."""
    if node in state.watch.given_up or node in _watched(state):
        return state
    return _listen(state, {node: Sighting(mailbox, None, now)})


def _listen(state: JobState, lost: Mapping[str, Sighting]) -> JobState:
    # Bounded: under a stranger's load, or in years, thousands may be given up.
    every = {**state.watch.given_up, **lost}
    return evolve(state, watch=evolve(state.watch, given_up=dict(list(every.items())[-REMEMBERED:])))


def heard_again(state: JobState, counts: Mapping[str, int]) -> tuple[JobState, tuple[tuple[str, str], ...]]:
    """Forget the nodes that were given up and still send heartbeats; return each with its mailbox."""
    silent: dict[str, Sighting] = {}
    back = []
    for node, sighting in state.watch.given_up.items():
        if sighting.is_before(counts.get(sighting.mailbox)):
            back.append((node, sighting.mailbox))
        else:
            silent[node] = sighting

    if not back:
        return state, ()

    return evolve(state, watch=evolve(state.watch, given_up=silent)), tuple(back)


def asks_anew(state: JobState, node: str) -> JobState:
    """Remove a node that asks for ranks from those that were given up."""
    if node not in state.watch.given_up:
        return state
    rest = dict(state.watch.given_up)
    del rest[node]
    return evolve(state, watch=evolve(state.watch, given_up=rest))


def read(state: JobState) -> HeartbeatsRead | None:
    """Return the last heartbeat count read of each node of the round; None without a round."""
    current = state.round
    if current is None:
        return None
    counts = [last_count(state, entry) for entry in current.entries.values()]
    return HeartbeatsRead.of(current.number, counts)


def last_count(state: JobState, entry: Entry) -> int:
    """Return the count of the last heartbeat read in that mailbox; 0 if none was."""
    sighting = _last_sighting(state, entry)
    if sighting is None or sighting.count is None:
        return 0
    return sighting.count


def is_missed(state: JobState, entry: Entry) -> bool:
    """Return whether the node's heartbeats were missing at the last look: it is soon heard or lost."""
    looked_at = state.watch.at
    sighting = _last_sighting(state, entry)
    if looked_at is None or sighting is None:
        return False
    return sighting.at <= looked_at - MISSED * state.rules.heartbeat


def next_loss(state: JobState) -> float | None:
    """Return when the next node is lost if it stays silent; None if no node can be lost."""
    timeout = state.rules.heartbeat
    looked_at = state.watch.at
    if not timeout or looked_at is None or state.final is not None:
        return None
    due = [sighting.at + timeout for sighting in state.watch.sightings.values()]
    # One that was due at the last look was judged by it.
    return min((time for time in due if time > looked_at), default=None)
