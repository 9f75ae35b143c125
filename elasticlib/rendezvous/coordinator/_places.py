"""
Nodes that come and go: what exits that a node makes itself cost its place. Pure.

A place is a host with the number that a scheduler, or a node rank, gives it there; where there is none, with the
address by which peers reach it. So agents that share a host's name are told apart. Where they share the address, too,
a newcomer goes on with what the worst of those did that are gone from there: their exits are not added up.

Rules of this file: an exit after a steady time, or beside a node that has succeeded, costs nothing. Others in a row
cost pauses, and then the place. Each exit makes the other nodes start twice; the pauses keep that at six starts a
minute with the default heartbeat time, the first start of the job included. A pause costs nobody else anything: the
round runs on, and where too few nodes are there without the one that pauses, it is taken all the same once waiting has
an end. A place to which nobody comes back for a steady time does no harm, either, unless it is refused by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Entry, Exits, Rules, State, host_of

STEADY = 60.0
"""Heartbeats after its arrival for which a node that goes has done no harm."""
PAUSES = (0.0, 6.0, 6.0, 6.0)
"""Heartbeats from the first, second, ... exit in a row until the place gets ranks again; after that it gets none."""
_HEARTBEAT = 10.0
"""Where the job has none."""
_LONGEST_WHY = 200
_REMEMBERED = 1024
"""Places that are remembered at most."""
_AGENTS = 64
"""Agents of one place that are remembered at most."""
_NAMED = 4


def place_of(entry: Entry) -> str:
    """The place of a node, as a text for people, too."""
    its = entry.descriptor
    return f"{host_of(entry.node)} ({its.addresses[0] if its.index is None else f'number {its.index}'})"


def refusal(state: State, entry: Entry, now: float) -> str | None:
    """Why the newcomer of *entry* gets no ranks, if it gets none."""
    place = place_of(entry)
    worst = _worst(_counting(state, place, now))
    if worst is None or not _is_refused(worst):
        return None
    return (
        f"node {entry.node} gets no ranks: the node at {place} joined and left {worst.times} times, each time "
        f"after less than {STEADY * _heartbeat(state.rules):g} s (last: {worst.why})"
    )


def arrived(state: State, entry: Entry, now: float) -> tuple[State, Entry]:
    """A newcomer asks for ranks, which it may have to pause for."""
    place = place_of(entry)
    if place not in state.exits:
        return state, entry
    others = _counting(state, place, now)
    exits = {each: its for each, its in state.exits.items() if each != place}
    worst = _worst(others)
    if worst is None:
        return evolve(state, exits=exits), entry
    due = worst.at + PAUSES[worst.times - 1] * _heartbeat(state.rules)
    others.remove(worst)
    if others:
        exits[place] = tuple(others)
    pausing = state.pausing | {entry.node} if due > now else state.pausing
    entry = evolve(entry, exits=worst, free_at=due if due > now else 0.0)
    return evolve(state, exits=exits, pausing=pausing), entry


def left(state: State, entry: Entry, why: str, now: float) -> State:
    """The node of *entry* goes by itself, its work is not done, and others lose time for it."""
    if now >= entry.arrived + STEADY * _heartbeat(state.rules):
        return state
    times = 1 if entry.exits is None else entry.exits.times + 1
    return _remember(_forget(state, now), entry, Exits(times, now, why[:_LONGEST_WHY]))


def gone(state: State, entries: Iterable[Entry]) -> State:
    """These nodes are gone in another way: whoever comes to their places goes on where they began."""
    for entry in entries:
        if entry.exits is not None:
            state = _remember(state, entry, entry.exits)
    return state


def refused(state: State) -> str:
    """The places that get no ranks any more, for people; empty where there are none."""
    lost = [
        f"{place}, which joined and left {its.times} times"
        for place, known in state.exits.items()
        if (its := _worst(known)) is not None and _is_refused(its)
    ]
    return "; ".join(lost[:_NAMED]) + (f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else "")


def ready(state: State, now: float) -> Mapping[str, Entry]:
    """Those of the nodes that wait which do not pause."""
    if not state.pausing:
        return state.waiting
    return {node: entry for node, entry in state.waiting.items() if entry.free_at <= now}


def next_free(state: State, now: float) -> float | None:
    """When the next pause of a node that waits is over; None where none pauses."""
    return min((entry.free_at for entry in _pausing(state) if entry.free_at > now), default=None)


def rested(state: State, now: float) -> list[str]:
    """Nodes that wait, and whose pause is over."""
    return [entry.node for entry in _pausing(state) if 0.0 < entry.free_at <= now]


def pauses(state: State, now: float) -> str:
    """Who pauses, and for how long still, for people; empty where nobody does."""
    return "; ".join(
        f"node {entry.node} pauses for {entry.free_at - now:.0f} s more, since the node at {place_of(entry)} joined "
        f"and left {entry.exits.times} times"
        for entry in _pausing(state)[:_NAMED]
        if entry.free_at > now and entry.exits is not None
    )


def _pausing(state: State) -> list[Entry]:
    return [state.waiting[node] for node in state.waiting if node in state.pausing] if state.pausing else []


def _heartbeat(rules: Rules) -> float:
    return rules.heartbeat or _HEARTBEAT


def _is_refused(exits: Exits) -> bool:
    return exits.times > len(PAUSES)


def _worst(known: Iterable[Exits]) -> Exits | None:
    return max(known, key=lambda its: (its.times, its.at), default=None)


def _counting(state: State, place: str, now: float) -> list[Exits]:
    """What happened at the place, without exits that lie a steady time back and did not cost it."""
    since = now - STEADY * _heartbeat(state.rules)
    return [its for its in state.exits.get(place, ()) if _is_refused(its) or its.at > since]


def _forget(state: State, now: float) -> State:
    kept = {place: tuple(_counting(state, place, now)) for place in state.exits}
    return evolve(state, exits={place: known for place, known in kept.items() if known})


def _remember(state: State, entry: Entry, exits: Exits) -> State:
    place = place_of(entry)
    known = sorted((*state.exits.get(place, ()), exits), key=lambda its: (its.times, its.at))[-_AGENTS:]
    others = {each: its for each, its in state.exits.items() if each != place} | {place: tuple(known)}
    if len(others) > _REMEMBERED:
        # Those that are refused go last; of the others the oldest first.
        spent = [each for each, its in others.items() if not _is_refused(its[-1])] or list(others)
        del others[spent[0]]
    return evolve(state, exits=others)
