"""Calls within the ``with`` block of an engine whose agents are simulated."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from attrs import define, field

from elasticlib import LaunchConfig, StartError, elastic_launch
from elasticlib.engines import (
    AgentCommand,
    AgentLost,
    AgentResult,
    AgentUp,
    EngineEvent,
    FrameReader,
    KeepsAgents,
    Kind,
)
from elasticlib.errors import ConfigError, SignalException
from elasticlib.remote._call import pack_error, pack_results


def train() -> None:
    raise AssertionError("the agents of these tests run nothing")


@define(eq=False)
class Agents:
    """A placement whose agents answer each call; *on_begin* says what they do then."""

    argv: tuple[str, ...]
    on_begin: Callable[[int, int], list[EngineEvent]]
    events: queue.SimpleQueue[EngineEvent | Exception | None] = field(factory=queue.SimpleQueue)
    numbers: list[int] = field(factory=lambda: [0, 0])
    calls: list[tuple[int, int]] = field(factory=list)
    """Place and number of each agent that got a call."""
    stops: list[int] = field(factory=list)
    """Places whose workers were stopped."""
    is_stopped: bool = False
    """True once the agents' input has ended, which only the end of the block may do."""
    is_closed: bool = False

    def next_event(self, timeout: float) -> EngineEvent | None:
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def send(self, place: int, data: bytes) -> None:
        for kind, _ in FrameReader(greeted=False).feed(data):
            self._take(kind, place, self.numbers[place])

    def _take(self, kind: Kind, place: int, number: int) -> None:
        if kind is Kind.CALL:
            self.calls.append((place, number))
            self.events.put(AgentUp(place, f"h{place}:1", number))
        if kind is Kind.BEGIN:
            for event in self.on_begin(place, number):
                self.events.put(event)
        if kind is Kind.STOP:
            self.stops.append(place)
            self.events.put(AgentResult(place, pack_error(SignalException("stopped", 15), 2), number))

    def replace(self, place: int) -> None:
        self.numbers[place] += 1

    def stop(self) -> None:
        self.is_stopped = True
        for place, number in enumerate(self.numbers):
            self.events.put(AgentLost(place, "ended", number))

    def close(self) -> None:
        self.is_closed = True
        self.events.put(None)


class Engine(KeepsAgents):
    nodes = 2
    endpoint = ""
    token = ""

    def __init__(self) -> None:
        self.placements: list[Agents] = []
        self.is_lost = False
        self.on_begin: Callable[[int, int], list[EngineEvent]] = lambda place, number: [result(place, number)]

    def start(self, agents: int, command: AgentCommand) -> Agents:
        assert b"" == command.payload
        self.placements.append(Agents(command.argv, lambda place, number: self.on_begin(place, number)))
        return self.placements[-1]

    def is_in_contact(self) -> bool:
        return not self.is_lost


def result(place: int, number: int = 0) -> AgentResult:
    return AgentResult(place, pack_results({place: f"value {place}"}, {}, 2), number)


def call(engine: Engine) -> dict[int, object]:
    return elastic_launch(LaunchConfig(shutdown_timeout=5), train, on=engine)()


BOTH = {0: "value 0", 1: "value 1"}


def test_agents_stay_for_the_next_call_and_end_with_the_block() -> None:
    engine = Engine()
    with engine as same:
        assert same is engine
        assert [BOTH, BOTH] == [call(engine), call(engine)]
        [agents] = engine.placements
        assert "--stays" == agents.argv[-1]
        assert [(0, 0), (1, 0)] * 2 == agents.calls
        assert not agents.is_stopped
    assert agents.is_stopped
    assert agents.is_closed


def test_agent_lost_between_calls_is_replaced() -> None:
    engine = Engine()
    with engine:
        call(engine)
        engine.placements[0].events.put(AgentLost(1, "killed"))
        assert call(engine) == BOTH
    assert engine.placements[0].calls[-1] == (1, 1)


def test_agent_lost_in_a_call_is_replaced_in_it() -> None:
    # The first agent has its result once the second place has its second agent.
    answers: dict[tuple[int, int], list[EngineEvent]] = {
        (1, 0): [AgentLost(1, "killed")],
        (1, 1): [result(1, 1), result(0)],
    }
    engine = Engine()
    with engine:
        engine.on_begin = lambda place, number: answers.get((place, number), [])
        assert call(engine) == BOTH
        assert call(engine) == BOTH
    assert [(0, 0), (1, 0), (1, 1), (0, 0), (1, 1)] == engine.placements[0].calls


def test_failed_call_leaves_the_agents_for_the_next_one() -> None:
    engine = Engine()
    error = ConfigError("torch is 1 on the client and 2 on h1: install the same version on both")
    with engine:
        engine.on_begin = lambda place, number: [AgentResult(place, pack_error(error, 0), number)]
        with pytest.raises(ConfigError, match="torch is 1 on the client"):
            call(engine)
        engine.on_begin = lambda place, number: [result(place, number)]
        assert call(engine) == BOTH
        assert 1 == len(engine.placements)


def test_stopped_call_leaves_the_agents_for_the_next_one() -> None:
    engine = Engine()
    with engine:
        engine.on_begin = lambda place, number: []
        job = elastic_launch(LaunchConfig(shutdown_timeout=5), train, on=engine).start()
        job.stop()
        with pytest.raises(SignalException, match=r"stopped by Job.stop\(\)"):
            job.result(60)

        engine.on_begin = lambda place, number: [result(place, number)]
        assert call(engine) == BOTH
        assert 1 == len(engine.placements)


def without_ends(engine: Engine) -> threading.Event:
    """Let the agents of *engine* begin calls and never end them; return an event that is set when one has begun."""
    has_begun = threading.Event()

    def answer(place: int, number: int) -> list[EngineEvent]:
        has_begun.set()
        return []

    engine.on_begin = answer
    return has_begun


def test_second_call_at_the_same_time_is_refused() -> None:
    engine = Engine()
    with engine:
        has_begun = without_ends(engine)
        job = elastic_launch(LaunchConfig(shutdown_timeout=5), train, on=engine).start()
        assert has_begun.wait(60)
        with pytest.raises(ConfigError, match=r"a call runs on .* already: wait for its end, or use another engine"):
            call(engine)
        job.stop()


def test_block_cannot_be_entered_twice() -> None:
    engine = Engine()
    with engine, pytest.raises(ConfigError, match="is in a with block already"), engine:
        pass


def test_end_of_the_block_ends_a_call() -> None:
    engine = Engine()
    with engine:
        has_begun = without_ends(engine)
        job = elastic_launch(LaunchConfig(shutdown_timeout=5), train, on=engine).start()
        assert has_begun.wait(60)

    with pytest.raises(StartError, match="the with block of the engine has ended"):
        job.result(60)
    # Their workers had the time of the call to save.
    assert [0, 1] == sorted(engine.placements[0].stops)


def test_error_of_the_engine_ends_the_call_and_the_next_one_has_new_agents() -> None:
    engine = Engine()

    def fail(place: int, number: int) -> list[EngineEvent]:
        engine.placements[-1].events.put(StartError("the rendezvous ended"))
        return []

    with engine:
        engine.on_begin = fail
        with pytest.raises(StartError, match="the rendezvous ended"):
            call(engine)
        engine.on_begin = lambda place, number: [result(place, number)]
        assert call(engine) == BOTH
        first, second = engine.placements
        assert first.is_closed
    assert second.is_closed


def test_engine_without_contact_starts_new_agents() -> None:
    engine = Engine()
    with engine:
        call(engine)
        engine.is_lost = True
        assert call(engine) == BOTH
        assert [True, False] == [each.is_closed for each in engine.placements]


def test_agents_are_ended_if_no_thread_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> threading.Thread:
        raise StartError("no thread")

    engine = Engine()
    monkeypatch.setattr("elasticlib.engines._kept_agents.start_thread", refused)
    with engine, pytest.raises(StartError, match="no thread"):
        call(engine)

    assert [True] == [each.is_closed for each in engine.placements]


@pytest.mark.timeout(60)
def test_error_of_the_engine_before_the_call_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(thread: threading.Thread) -> threading.Thread:
        thread.start()
        thread.join()
        return thread

    def fail(self: Agents, timeout: float) -> None:
        raise OSError("no answer")

    monkeypatch.setattr("elasticlib.engines._kept_agents.start_thread", ended)
    monkeypatch.setattr(Agents, "next_event", fail)

    with Engine() as engine, pytest.raises(OSError, match="no answer"):
        call(engine)
    assert engine.placements[0].is_closed
