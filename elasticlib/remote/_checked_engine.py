"""
Calls of an engine, which may be a user's own: its mistakes become one error, and Ctrl-C ends a call that blocks.

Rules of this file: an error of the engine's own passes through, except where it would hide the outcome of the job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from elasticlib.engines import (
    AgentCommand,
    AgentLost,
    AgentOutput,
    AgentReport,
    AgentResult,
    AgentUp,
    Engine,
    EngineEnds,
    EngineEvent,
    Placement,
)
from elasticlib.errors import ConfigError, SignalException
from elasticlib.workers import HandledSignals

_log = logging.getLogger("elasticlib")

_METHODS = ("next_event", "send", "replace", "stop", "close")
_CONTENTS: tuple[tuple[type, str, type], ...] = (
    (AgentUp, "address", str),
    (AgentLost, "why", str),
    (AgentOutput, "data", bytes),
    (AgentResult, "data", bytes),
    (AgentReport, "data", bytes),
    (EngineEnds, "why", str),
)
"""Events with the field that has their content, and its type."""


def check_number_of_nodes(engine: Any) -> None:
    """Raise `ConfigError` for an engine without a valid number of nodes."""
    nodes = getattr(engine, "nodes", None)
    if type(nodes) is not int or nodes < 1:
        raise ConfigError.of_setting("on", f"{engine!r} has nodes={nodes!r}, which must be a whole number from 1 on")


def place_agents(
    engine: Engine, agents: int, command: AgentCommand, signals: HandledSignals, title: str
) -> CheckedPlacement:
    """
    Let *engine* start *command* on *agents* machines. Raises `ConfigError` for what cannot be a placement.

    A signal of *signals* is raised in the engine's code, which may wait long for machines.
    """
    name = type(engine).__name__
    with signals.raised(f"{name}.place() started the agents of job {title!r}"):
        placement = engine.place(agents, command)

    missing = [name for name in _METHODS if not callable(getattr(placement, name, None))]
    checked = CheckedPlacement(placement, agents, signals)
    if missing:
        # It may have started agents.
        if "close" not in missing:
            checked.close()
        raise ConfigError(
            f"{name}.place() returned {placement!r}, which has no method {missing[0]}: return an object with the "
            f"methods {', '.join(_METHODS)}"
        )
    return checked


class CheckedPlacement:
    """A placement with *agents* places; the second one of *signals* within one call of its methods is raised there."""

    def __init__(self, placement: Placement, agents: int, signals: HandledSignals) -> None:
        self._placement, self._signals = placement, signals
        self.name = type(placement).__name__
        self._numbers = [0] * agents
        """Numbers of the present agents, by place."""

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Return the next event. Raises `ConfigError` for a wrong one."""
        event = self._placement.next_event(timeout)
        complaint = "" if event is None else _complaint_about(event, self._numbers)
        if complaint:
            raise ConfigError(f"{self.name}.next_event() returned {event!r}, {complaint}")
        return event

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the agent at *place*."""
        with self._signals.raised(f"{self.name}.send() wrote to agent {place}", count=2):
            self._placement.send(place, data)

    def replace(self, place: int) -> None:
        """Start another agent at *place*."""
        with self._signals.raised(f"{self.name}.replace() started agent {place}", count=2):
            self._numbers[place] += 1
            self._placement.replace(place)

    def stop(self) -> None:
        """End the standard input of all agents."""
        with self._signals.raised(f"{self.name}.stop() stopped the agents", count=2):
            self._placement.stop()

    def close(self) -> None:
        """End all agents at once; an error is logged, since the outcome of the job counts more."""
        try:
            with self._signals.raised(f"{self.name}.close() ended the agents", count=2):
                self._placement.close()
        except SignalException:
            raise
        except Exception as error:
            _log.warning("%s.close() raised %r: some agents may be left", self.name, error)


def _complaint_about(event: object, numbers: Sequence[int]) -> str:
    """Return why *event* cannot be one of agents with these *numbers*, and what to do; empty if it can be."""
    known = next((each for each in _CONTENTS if isinstance(event, each[0])), None)
    if known is None:
        return "which is not an event: return one of elasticlib.engines, or None"

    _, name, kind = known
    content = getattr(event, name)
    if not isinstance(content, kind):
        return f"whose {name} is not {kind.__name__}: {content!r}"
    if isinstance(event, EngineEnds):
        return ""
    of_agent = _complaint_about_agent(getattr(event, "place", None), getattr(event, "agent", None), len(numbers))
    if of_agent or not isinstance(event, AgentUp):
        return of_agent
    return _complaint_about_new_agent(event, numbers[event.place])


def _complaint_about_agent(place: object, agent: object, places: int) -> str:
    if not isinstance(place, int) or not 0 <= place < places:
        return f"whose place {place!r} is not one of the job: give the number of the agent's place, 0 to {places - 1}"
    if not isinstance(agent, int):
        return f"whose agent {agent!r} is not a number: give 0, and one more after each replace"
    return ""


def _complaint_about_new_agent(event: AgentUp, number: int) -> str:
    """Return why an agent that is up cannot be that with this *number* at its place."""
    if not event.address.rpartition(":")[2].isdigit():
        return "whose address is not host:port"
    # The supervisor would wait for the right one: an agent that was replaced is lost before, and lists nothing then.
    if event.agent != number:
        return f"but the present agent there has number {number}: give 0, and one more after each replace"
    return ""
