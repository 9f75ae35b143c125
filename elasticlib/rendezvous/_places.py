"""
Nodes that come and go: what exits that a node makes itself cost its place. Pure.

A place is a host with the number that a scheduler, or a node rank, gives it there; where there is none, with the
address by which peers reach it. So agents that share a host's name are told apart, and one that was started again is
not.

Rules of this file: an exit after a steady time, or beside a node that has succeeded, costs nothing. Others in a row
cost pauses that grow, and then the place. A pause costs nobody else anything: the round runs on, and where too few
nodes are there without the one that pauses, it is taken all the same once waiting has an end.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from elasticlib.rendezvous._state import Entry, Exits, Rules, State, host_of

STEADY = 60.0
"""Heartbeats after its arrival for which a node that goes has done no harm."""
PAUSES = (0.0, 1.0, 2.0, 4.0)
"""Heartbeats from the first, second, ... exit in a row until the place gets a seat again; after that it gets none."""
_HEARTBEAT = 10.0
"""Where the job has none."""
_LONGEST_WHY = 200
_REMEMBERED = 1024
"""Places whose exits are remembered at most."""


def place_of(entry: Entry) -> str:
    """The place of a node, as a text for people, too."""
    its = entry.descriptor
    return f"{host_of(entry.node)} ({its.addresses[0] if its.index is None else f'number {its.index}'})"


def count_exit(state: State, entry: Entry, why: str, now: float) -> State:
    """The node of *entry* goes by itself, and its work is not done."""
    heartbeat, place = _heartbeat(state.rules), place_of(entry)
    others = {each: its for each, its in state.exits.items() if each != place}
    if now >= entry.arrived + STEADY * heartbeat:
        return evolve(state, exits=others) if place in state.exits else state
    known = state.exits.get(place)
    times = 1 if known is None else known.times + 1
    others[place] = Exits(times, now, why[:_LONGEST_WHY])
    return evolve(state, exits=_worth_remembering(others, now - STEADY * heartbeat))


def free_at(state: State, entry: Entry, now: float) -> float:
    """When the newcomer of *entry* may have a seat, if it must pause; else 0."""
    exits = state.exits.get(place_of(entry))
    if exits is None or is_refused(exits):
        return 0.0
    due = exits.at + PAUSES[exits.times - 1] * _heartbeat(state.rules)
    return due if due > now else 0.0


def is_refused(exits: Exits) -> bool:
    """Whether the place gets no seat any more."""
    return exits.times > len(PAUSES)


def refusal(state: State, entry: Entry) -> str | None:
    """Why the newcomer of *entry* gets no seat, if it gets none."""
    place = place_of(entry)
    exits = state.exits.get(place)
    if exits is None or not is_refused(exits):
        return None
    return (
        f"node {entry.node} gets no seat: the node at {place} came and went {exits.times} times, each time after less "
        f"than {STEADY * _heartbeat(state.rules):g} s (at last: {exits.why})"
    )


def refused(state: State) -> str:
    """The places that get no seat any more, for people; empty where there are none."""
    lost = [f"{place}, which came and went {its.times} times" for place, its in state.exits.items() if is_refused(its)]
    return "; ".join(lost[:4]) + (f"; and {len(lost) - 4} more" if len(lost) > 4 else "")


def ready(state: State, now: float) -> Mapping[str, Entry]:
    """Those of the nodes that wait which do not pause."""
    if not state.exits:
        return state.waiting
    return {node: entry for node, entry in state.waiting.items() if entry.free_at <= now}


def next_free(state: State, now: float) -> float | None:
    """When the next pause of a node that waits is over; None where none pauses."""
    if not state.exits:
        return None
    return min((entry.free_at for entry in state.waiting.values() if entry.free_at > now), default=None)


def pauses(state: State, now: float) -> str:
    """Who pauses, and for how long still, for people; empty where nobody does."""
    if not state.exits:
        return ""
    waits = [(entry.free_at - now, entry) for entry in state.waiting.values() if entry.free_at > now]
    return "; ".join(
        f"node {entry.node} pauses for {left:.0f} s more, since the node at {place_of(entry)} came and went "
        f"{state.exits[place_of(entry)].times} times"
        for left, entry in waits[:4]
        if place_of(entry) in state.exits
    )


def _heartbeat(rules: Rules) -> float:
    return rules.heartbeat or _HEARTBEAT


def _worth_remembering(exits: Mapping[str, Exits], since: float) -> Mapping[str, Exits]:
    if len(exits) <= _REMEMBERED:
        return exits
    # Those that are refused last, and of each kind the latest.
    kept = [place for place, its in exits.items() if is_refused(its) or its.at >= since][-_REMEMBERED:]
    return {place: exits[place] for place in kept}
