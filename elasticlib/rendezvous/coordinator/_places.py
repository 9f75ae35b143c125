"""
Places of nodes that are gone: the price of early exits for the next node there, and how long names
are kept. Pure.

A place is a host with the number that a scheduler, or a node rank, gives it there. Without a
number, it is a host with the address by which peers reach it. So agents that share a host's name
have different places. Agents that share the address, too, have one place. Each exit counts one more
than its node found when it came, so exits side by side are not added up.

Rules of this file:

* An exit after a steady time, or beside a node that has succeeded, costs nothing.
* Other exits in a row cost pauses, and then the place. Each exit makes the other nodes start twice.
  The pauses limit
that to six starts a minute with the default heartbeat time, including the first start of the job.
* A pause costs no other node anything: the round continues. If too few nodes are left without the
  pausing one, it is
used at the end of the wait.
* A place to which no node returns for a steady time does no harm, either, unless it is refused by
  then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Entry, Exits, JobState, Rules, host_of

STEADY = 60.0
"""Heartbeats after a node's arrival; an exit after that does no harm."""
PAUSES = (0.0, 6.0, 6.0, 6.0)
"""Heartbeats from the first, second, ... exit in a row until the place gets ranks again; after that it gets none."""
NAMES = 10_000
"""Nodes that are gone whose names are remembered at most."""
_HEARTBEAT = 10.0
"""Used where the job has no heartbeat."""
_LONGEST_WHY = 200
_PLACES = 1024
"""Places whose exits are remembered at most."""
_NAMED = 4


def place_of(entry: Entry) -> str:
    """Return the place of a node, as a text that people read, too."""
    descriptor = entry.descriptor
    host = host_of(entry.node)
    if descriptor.index is None:
        return f"{host} ({descriptor.addresses[0]})"
    return f"{host} (number {descriptor.index})"


# Arrivals.


def refusal(state: JobState, entry: Entry, now: float) -> str | None:
    """Return why the newcomer of *entry* gets no ranks; None if it gets some."""
    place = place_of(entry)
    exits = state.exits.get(place)
    if exits is None or not _is_refused(exits):
        return None
    return (
        f"node {entry.node} gets no ranks: the node at {place} joined and left {exits.times} times, each time "
        f"after less than {_steady(state.rules):g} s (last: {exits.why})"
    )


def arrived(state: JobState, entry: Entry, now: float) -> tuple[JobState, Entry]:
    """Note a newcomer that asks for ranks, for which it may have to pause."""
    place = place_of(entry)
    exits = state.exits.get(place)
    if exits is None:
        return state, entry

    # No node came for a steady time: the row is over.
    if not _counts(exits, state.rules, now):
        return evolve(state, exits=_without(state.exits, place)), entry

    entry = evolve(entry, exits=exits.times)
    due = exits.at + PAUSES[exits.times - 1] * _heartbeat(state.rules)
    if due <= now:
        return state, entry

    return evolve(state, pausing=state.pausing | {entry.node}), evolve(entry, free_at=due)


# Exits.


def left(state: JobState, entry: Entry, why: str, now: float) -> JobState:
    """
    Note that the node of *entry* leaves on its own request before its work is done, and costs
    others time.
    """
    # An exit after a steady time does no harm.
    if now >= entry.arrived + _steady(state.rules):
        return state

    place = place_of(entry)

    # Each exit clears up: rows that are over would fill the memory.
    known = {each: exits for each, exits in state.exits.items() if _counts(exits, state.rules, now)}
    times = entry.exits + 1

    # Another node may have left the same place meanwhile: the higher count stands.
    is_highest = place not in known or known[place].times <= times
    if is_highest:
        known.pop(place, None)
        known[place] = Exits(times, now, why[:_LONGEST_WHY])

    if len(known) > _PLACES:
        del known[_first_to_forget(known)]
    return evolve(state, exits=known)


def _first_to_forget(known: Mapping[str, Exits]) -> str:
    """Return the oldest place that is not refused; if all are refused, the oldest of all."""
    for place, exits in known.items():
        if not _is_refused(exits):
            return place
    return next(iter(known))


def forget_names(state: JobState) -> JobState:
    """
    Forget the oldest of the nodes that are gone, if there are too many.

    An old message of a forgotten node is not recognized if somebody writes it again.
    """
    assigned = {} if state.round is None else state.round.entries

    # Each join leads here: mostly the numbers are enough, without a walk through all names.
    excess = len(state.received) - NAMES - len(state.waiting) - len(assigned)
    if excess <= 0:
        return state

    here = state.waiting.keys() | assigned.keys()
    gone = [node for node in state.received if node not in here]
    received = dict(state.received)
    for node in gone[:excess]:
        del received[node]
    return evolve(state, received=received, has_forgotten=True)


# Pauses and refusals.


def ready(state: JobState, now: float) -> Mapping[str, Entry]:
    """Return the waiting nodes that do not pause."""
    if not state.pausing:
        return state.waiting
    return {node: entry for node, entry in state.waiting.items() if entry.free_at <= now}


def next_free(state: JobState, now: float) -> float | None:
    """Return when the next pause of a waiting node is over; None if none pauses."""
    return min((entry.free_at for entry in _had_to_pause(state) if entry.free_at > now), default=None)


def rested(state: JobState, now: float) -> list[str]:
    """Return the waiting nodes whose pause is over."""
    return [entry.node for entry in _had_to_pause(state) if 0.0 < entry.free_at <= now]


def pauses(state: JobState, now: float) -> str:
    """Describe the pausing nodes and the time left; empty if no node pauses."""
    pausing = [entry for entry in _had_to_pause(state) if entry.free_at > now]
    return "; ".join(
        f"node {entry.node} pauses for {entry.free_at - now:.0f} s more, since the node at {place_of(entry)} joined "
        f"and left {entry.exits} times"
        for entry in pausing[:_NAMED]
    )


def refused(state: JobState) -> str:
    """Return the places that get no ranks any more, for people; empty if there are none."""
    places = []
    for place, exits in state.exits.items():
        if _is_refused(exits):
            places.append(f"{place}, which joined and left {exits.times} times")
    # A thousand places would fill a screen.
    text = "; ".join(places[:_NAMED])
    if len(places) > _NAMED:
        text += f"; and {len(places) - _NAMED} more"
    return text


def _had_to_pause(state: JobState) -> Iterator[Entry]:
    if not state.pausing:
        return
    for node, entry in state.waiting.items():
        if node in state.pausing:
            yield entry


def _is_refused(exits: Exits) -> bool:
    return exits.times > len(PAUSES)


def _counts(exits: Exits, rules: Rules, now: float) -> bool:
    """
    Return whether the exits still cost the place something: it is refused for good, or was not
    steady for long enough.
    """
    return _is_refused(exits) or exits.at > now - _steady(rules)


def _steady(rules: Rules) -> float:
    return STEADY * _heartbeat(rules)


def _heartbeat(rules: Rules) -> float:
    return rules.heartbeat or _HEARTBEAT


def _without(exits: Mapping[str, Exits], place: str) -> dict[str, Exits]:
    return {each: its for each, its in exits.items() if each != place}
