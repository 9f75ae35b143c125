"""
Who is silent. Pure.

Rules of this file: counters are compared, never clocks of two hosts: a node whose count grows lives, and the
coordinator times with its own clock how long one has not. A count that is lower than before is a heartbeat of the
past which somebody wrote again. A coordinator that did not look for a while was paused itself, or is new: it blames
nobody for what it did not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Entry, Sighting, State
from elasticlib.rendezvous.protocol._heartbeats_read import HeartbeatsRead

MISSED = 0.45
"""
Share of the heartbeat time for which no heartbeat of a node came, whose heartbeats are missed.

Between two heartbeats lie 0.25 of it, and the coordinator looks after each 0.1.
"""
REMEMBERED = 64
"""Nodes that were given up and are still listened to."""


def mailboxes(state: State) -> Mapping[str, str]:
    """
    The mailbox of each node whose heartbeats count.

    These are all that wait or are in the round, but for those that were lost; a node that leaves counts until
    its workers are gone.
    """
    return {node: entry.mailbox for node, entry in _watched(state).items()}


def _watched(state: State) -> Mapping[str, Entry]:
    found = dict(state.waiting)
    current = state.round
    if current is not None:
        for node, entry in current.entries.items():
            if node not in current.left or (node not in current.stopped and node not in current.succeeded):
                found.setdefault(node, entry)
    return found


def given_up(state: State) -> Mapping[str, str]:
    """The mailbox of each node that was lost, and is told so if it is heard again."""
    return {node: sighting.mailbox for node, sighting in state.watch.given_up.items()}


def look(state: State, counts: Mapping[str, int], now: float) -> tuple[State, tuple[str, ...]]:
    """What the heartbeats tell: the nodes that were silent for longer than they may be."""
    watch, timeout = state.watch, state.rules.heartbeat
    looks_late = was_away(state, now)
    sightings: dict[str, Sighting] = {}
    silent = []
    for node, entry in _watched(state).items():
        old, count = watch.sightings.get(node), counts.get(entry.mailbox)
        if old is None or old.mailbox != entry.mailbox:
            old = Sighting(entry.mailbox, None, entry.came)
        if count is not None and (old.count is None or count > old.count):
            sightings[node] = Sighting(entry.mailbox, count, now)
        elif looks_late:
            sightings[node] = evolve(old, at=now)
        else:
            sightings[node] = old
            if now - old.at >= timeout:
                silent.append(node)
    return evolve(state, watch=evolve(watch, sightings=sightings, at=now)), tuple(silent)


def was_away(state: State, now: float) -> bool:
    """Whether the coordinator has not looked at heartbeats for a while."""
    return state.watch.at is None or now - state.watch.at > state.rules.heartbeat / 2


def give_up(state: State, silent: Iterable[str]) -> State:
    """These nodes are lost; they are listened to, in case they are heard again."""
    return _listen(state, {node: state.watch.sightings[node] for node in silent})


def listen_again(state: State, node: str, mailbox: str, now: float) -> State:
    """The *node* has no part in the job any more; should it send heartbeats there, it is told so."""
    if node in state.watch.given_up or node in _watched(state):
        return state
    return _listen(state, {node: Sighting(mailbox, None, now)})


def _listen(state: State, lost: Mapping[str, Sighting]) -> State:
    every = {**state.watch.given_up, **lost}
    return evolve(state, watch=evolve(state.watch, given_up=dict(list(every.items())[-REMEMBERED:])))


def heard_again(state: State, counts: Mapping[str, int]) -> tuple[State, tuple[tuple[str, str], ...]]:
    """Nodes that were given up and still send heartbeats, each with its mailbox; they are told once."""
    lost = state.watch.given_up
    back = {
        node: seen.mailbox
        for node, seen in lost.items()
        if (count := counts.get(seen.mailbox)) is not None and (seen.count is None or count > seen.count)
    }
    if not back:
        return state, ()
    rest = {node: seen for node, seen in lost.items() if node not in back}
    return evolve(state, watch=evolve(state.watch, given_up=rest)), tuple(back.items())


def asks_anew(state: State, node: str) -> State:
    """A node that was given up has a part in the job again."""
    if node not in state.watch.given_up:
        return state
    rest = {other: seen for other, seen in state.watch.given_up.items() if other != node}
    return evolve(state, watch=evolve(state.watch, given_up=rest))


def read(state: State) -> HeartbeatsRead | None:
    """Which heartbeats of the nodes of the last round were read, for those whose heartbeats there still count."""
    current = state.round
    if current is None:
        return None
    return HeartbeatsRead.of(current.number, (last_count(state, entry) for entry in current.entries.values()))


def last_count(state: State, entry: Entry) -> int:
    """The count of the last heartbeat that was read in that mailbox; 0: none was."""
    seen = state.watch.sightings.get(entry.node)
    return 0 if seen is None or seen.mailbox != entry.mailbox else seen.count or 0


def is_missed(state: State, entry: Entry) -> bool:
    """Whether the node's heartbeats were missed when they were last read: soon it is heard again, or lost."""
    watch = state.watch
    seen = watch.sightings.get(entry.node)
    if watch.at is None or seen is None or seen.mailbox != entry.mailbox:
        return False
    return seen.at <= watch.at - MISSED * state.rules.heartbeat


def next_loss(state: State) -> float | None:
    """When the next node will have been silent for too long, if it goes on so; None if nobody may be lost."""
    watch, timeout = state.watch, state.rules.heartbeat
    if not timeout or watch.at is None or state.final is not None:
        return None
    times = (sighting.at + timeout for sighting in watch.sightings.values())
    return min((time for time in times if time > watch.at), default=None)
