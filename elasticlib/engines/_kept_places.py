"""
Decisions about agents that serve one call after another. Pure.

The life of a place, from call to call:

    IDLE (its agent waits for a call) -> CALLED (it has been sent one) -> SERVING (it has answered) -> IDLE (its result)
    any -> LOST -> CALLED (another agent, which gets the present call at once)

    agent    it answers           its result               it is lost
    IDLE     -                    -                        LOST: replaced at the next call
    CALLED   SERVING, reported    IDLE, reported           replaced: the call has not failed, since the loss was before;
                                                           LOST, reported, after some replacements in one call
    SERVING  reported             IDLE, reported           LOST, reported: the client decides

Rules of this file: to the client each call looks like agents of its own. So the agents of a place are counted from 0 in
each call, and an agent is reported as ended behind its result. Events of former agents count for nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import define, evolve, frozen

from elasticlib.engines._protocol import AgentLost, AgentResult, AgentUp, EngineEnds, EngineEvent


class KeptState(enum.Enum):
    """States of a place."""

    IDLE = "idle"
    CALLED = "called"
    SERVING = "serving"
    LOST = "lost"


_MOST_RENEWALS = 2
"""Agents that a call starts at one place before it counts the place as lost."""
_AT_CALL = frozenset({KeptState.CALLED, KeptState.SERVING})


@define
class _KeptPlace:
    """One place, and its present agent."""

    state: KeptState = KeptState.IDLE
    agent: int = 0
    """Number of the agent at the engine."""
    first: int = 0
    """Number of the agent that the call knows as 0."""
    renewals: int = 0
    """Agents that were started for the present call, in place of one that was lost before it answered."""


@frozen
class AgentRenewal:
    """Result of an event: the engine must start another agent at *place*, and send it the call."""

    place: int


class KeptPlaces:
    """The places of an engine's agents, which stay from call to call."""

    def __init__(self, count: int) -> None:
        self._places = [_KeptPlace() for _ in range(count)]

    # Calls.

    def begin_call(self) -> list[AgentRenewal]:
        """Begin a call: all agents get it, after those at the returned places were renewed."""
        renewed = []
        for number, place in enumerate(self._places):
            place.renewals = 0
            if place.state is KeptState.LOST:
                place.agent += 1
                place.renewals = 1
                renewed.append(AgentRenewal(number))
            place.state = KeptState.CALLED
            place.first = place.agent
        return renewed

    def end_call(self) -> list[AgentRenewal]:
        """End the call: only agents that are idle can serve another one, and the others must be renewed."""
        renewed = [number for number, place in enumerate(self._places) if place.state is not KeptState.IDLE]
        for number in renewed:
            self._places[number].agent += 1
            self._places[number].state = KeptState.IDLE
        return [AgentRenewal(number) for number in renewed]

    def replace(self, place: int) -> None:
        """Note that the client has another agent started at *place*, which gets the call."""
        self._places[place].agent += 1
        self._places[place].state = KeptState.SERVING

    def is_at_call(self, place: int) -> bool:
        """Return True if frames of the call are for the agent at *place*."""
        return self._places[place].state in _AT_CALL

    def are_all_lost(self) -> bool:
        """Return True if no agent is left."""
        return all(place.state is KeptState.LOST for place in self._places)

    # Events.

    def handle(self, event: EngineEvent) -> Sequence[EngineEvent | AgentRenewal]:
        """Return what the call learns from *event* of the engine, or the place that must be renewed."""
        if isinstance(event, EngineEnds):
            return [event]
        place = self._places[event.place]
        # It comes from a former agent of the place.
        if event.agent != place.agent:
            return []
        if isinstance(event, AgentLost):
            return self._on_lost(event, place)
        # Of an agent that waits for a call, or is lost, nothing else counts.
        if place.state not in _AT_CALL:
            return []

        reported = evolve(event, agent=event.agent - place.first)
        match event:
            case AgentUp():
                place.state = KeptState.SERVING
            case AgentResult():
                place.state = KeptState.IDLE
                return [reported, AgentLost(event.place, "it waits for the next call", reported.agent)]
        return [reported]

    def _on_lost(self, event: AgentLost, place: _KeptPlace) -> Sequence[EngineEvent | AgentRenewal]:
        former, place.state = place.state, KeptState.LOST
        match former:
            case KeptState.SERVING:
                return [evolve(event, agent=event.agent - place.first)]
            # An engine may learn of a lost machine only after it has placed the new agent there, too.
            case KeptState.CALLED if place.renewals < _MOST_RENEWALS:
                place.agent += 1
                place.renewals += 1
                place.first, place.state = place.agent, KeptState.CALLED
                return [AgentRenewal(event.place)]
            case KeptState.CALLED:
                return [evolve(event, agent=event.agent - place.first)]
            case _:
                return []
