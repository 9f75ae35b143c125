"""A call on an engine whose agents are simulated: what the client sends, returns and raises."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from attrs import define, field

from elasticlib import LaunchConfig, SignalException, StartError, elastic_launch
from elasticlib.engines import (
    AgentCommand,
    AgentLost,
    AgentOutput,
    AgentResult,
    AgentUp,
    CallRules,
    EngineEnds,
    EngineEvent,
    FrameReader,
    Kind,
)
from elasticlib.errors import ConfigError
from elasticlib.remote._call import JobSettings, pack_error, pack_results
from elasticlib.remote._shown_output import ShownOutput
from tests.waiting import wait_until


def train() -> None:
    raise AssertionError("the agents of these tests run nothing")


@define(eq=False)
class SimulatedEngine:
    """An engine whose agents do as *on_begin* says; by default they return their places."""

    nodes: int = 2
    endpoint: str = ""
    token: str = ""
    on_begin: Callable[[SimulatedEngine, int, int], list[EngineEvent]] | None = None
    on_place: Callable[[int], EngineEvent] = lambda place: AgentUp(place, f"h{place}:1")
    events: queue.SimpleQueue[EngineEvent | Exception | None] = field(factory=queue.SimpleQueue)
    settings: list[JobSettings] = field(factory=list)
    numbers: dict[int, int] = field(factory=dict)
    stops: list[int] = field(factory=list)
    """Places whose workers were stopped."""
    is_closed: bool = False
    ends_after_result: bool = False
    """True if agents end as soon as they have sent their results."""
    unread: threading.Event = field(factory=threading.Event)
    """Set once all events are in the client's inbox."""
    readers: dict[int, FrameReader] = field(factory=dict)

    def place(self, agents: int, command: AgentCommand) -> SimulatedEngine:
        assert [Kind.CALL] == [kind for kind, _ in FrameReader(greeted=False).feed(command.payload)]
        for place in range(agents):
            self.numbers[place] = 0
            self.events.put(self.on_place(place))
        return self

    def next_event(self, timeout: float) -> EngineEvent | None:
        if self.ends_after_result and self.events.empty() and self.settings:
            self.unread.set()
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def send(self, place: int, data: bytes) -> None:
        for kind, content in FrameReader(greeted=False).feed(data):
            if kind is Kind.BEGIN:
                self.settings.append(JobSettings.unpacked(content))
                for event in self._answers(place):
                    self.events.put(event)
            if kind is Kind.STOP:
                self.stops.append(place)
            if kind is Kind.STOP and not self.ends_after_result:
                self.events.put(AgentLost(place, "stopped", self.numbers[place]))

    def _answers(self, place: int) -> list[EngineEvent]:
        number = self.numbers[place]
        if self.on_begin is not None:
            return self.on_begin(self, place, number)
        return [result(place, number)]

    def replace(self, place: int) -> None:
        self.numbers[place] += 1
        self.events.put(AgentUp(place, f"spare{place}:1", self.numbers[place]))

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.events.put(None)


def result(place: int, number: int = 0) -> AgentResult:
    return AgentResult(place, pack_results({place: f"value {place}"}, {}, 2), number)


def call(engine: SimulatedEngine, config: LaunchConfig | None = None) -> dict[int, object]:
    return elastic_launch(config or LaunchConfig(), train, on=engine)()


def test_results_of_all_agents_are_returned(capsys: pytest.CaptureFixture[str]) -> None:
    engine = SimulatedEngine(on_begin=lambda _, place, number: [AgentOutput(place, b"\x01line\n"), result(place)])

    assert {0: "value 0", 1: "value 1"} == call(engine)
    assert "line\nline\n" == capsys.readouterr().out
    assert engine.is_closed
    assert [("h0:1", True, 2, 2), ("h0:1", False, 2, 2)] == [
        (each.endpoint, each.is_host, each.min_nodes, each.max_nodes) for each in engine.settings
    ]
    assert 1 == len({each.token for each in engine.settings})


@pytest.mark.timeout(60)
def test_ends_of_agents_that_arrive_together_with_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the client would wait for ends that it has read, until the grace is over."""

    def answer(_: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        if place == 0:
            return []
        return [AgentOutput(1, b"\x01line\n"), result(0), result(1), AgentLost(0, "ended"), AgentLost(1, "ended")]

    engine = SimulatedEngine(on_begin=answer, ends_after_result=True)
    # All events behind the output come while it is shown.
    monkeypatch.setattr(ShownOutput, "show", lambda self, data, taken: (engine.unread.wait(30), taken()))

    assert {0: "value 0", 1: "value 1"} == call(engine, LaunchConfig(shutdown_timeout=3600))


@define(eq=False)
class ReadAtItsEnd(SimulatedEngine):
    """An engine whose end is read before `close` returns."""

    has_read_end: bool = False
    waits_again: threading.Event = field(factory=threading.Event)

    def next_event(self, timeout: float) -> EngineEvent | None:
        if self.is_closed and self.has_read_end:
            self.waits_again.set()
        event = super().next_event(timeout)
        self.has_read_end = self.is_closed and event is None
        return event

    def close(self) -> None:
        self.is_closed = True
        self.events.put(None)
        wait_until(self.events.empty, 30, "its end is read")
        # Time in which the thread would ask again.
        self.waits_again.wait(0.5)


def test_an_end_that_is_read_early_is_not_waited_for_twice() -> None:
    engine = ReadAtItsEnd()

    call(engine)

    assert not engine.waits_again.is_set()


@pytest.mark.timeout(60)
def test_agent_that_sends_nothing_after_its_begin_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        if place == 0:
            return [AgentOutput(0, b"\x01works\n")]
        return [] if number == 0 else [result(1, number), result(0)]

    monkeypatch.setattr("elasticlib.remote._remote_launch.CallRules", partial(CallRules, begin_timeout=1.0))
    engine = SimulatedEngine(on_begin=answer)

    assert {0: "value 0", 1: "value 1"} == call(engine)
    assert {0: 0, 1: 1} == engine.numbers
    assert ["agent 1 has sent nothing for 1 s since its node was to begin; the job goes on"] == caplog.messages


def test_no_machine_is_requested_without_a_thread_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> threading.Thread:
        raise StartError("can't start new thread")

    monkeypatch.setattr("elasticlib.remote._output_queue.start_thread", refuse)
    engine = SimulatedEngine()

    with pytest.raises(StartError, match="can't start new thread"):
        call(engine)
    assert {} == engine.numbers


def test_range_of_nodes_reaches_the_agents() -> None:
    engine = SimulatedEngine()

    call(engine, LaunchConfig(min_nodes=1, max_nodes=2))

    assert {(1, 2)} == {(each.min_nodes, each.max_nodes) for each in engine.settings}


def test_lost_agent_is_replaced_and_its_late_result_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    def answer(_: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        if place == 0:
            return []
        return [AgentLost(1, "gone"), result(1)] if number == 0 else [result(1, number), result(0)]

    engine = SimulatedEngine(on_begin=answer)

    assert {0: "value 0", 1: "value 1"} == call(engine)
    assert 1 == engine.numbers[1]
    assert ["gone; the job goes on"] == caplog.messages


def test_error_of_an_agent_is_raised_with_its_class() -> None:
    error = ConfigError("torch is 1 on the client and 2 on h1: install the same version on both")
    engine = SimulatedEngine(on_begin=lambda _, place, number: [AgentResult(place, pack_error(error, 0))])

    with pytest.raises(ConfigError, match="torch is 1 on the client"):
        call(engine)
    assert engine.is_closed


def test_host_that_cannot_be_reached_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = SimulatedEngine(on_place=lambda place: AgentLost(place, f"host h{place}: refused"))

    with pytest.raises(StartError, match=r"^host h0: refused$"):
        call(engine)
    assert engine.is_closed
    assert [] == caplog.messages


def test_error_of_a_host_waits_for_no_host_without_workers() -> None:
    def answer(engine: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        # The other host is found to be out of reach once this one has begun.
        return [AgentLost(1, "host h1: refused")]

    engine = SimulatedEngine(
        on_place=lambda place: AgentUp(0, "h0:1") if place == 0 else AgentOutput(1, b"\x01connects\n"),
        on_begin=answer,
    )

    with pytest.raises(StartError, match=r"^host h1: refused$"):
        call(engine)
    assert 1 == len(engine.settings)
    assert [] == engine.stops


@pytest.mark.parametrize("nodes", ["2", 0, None, 2.0, True])
def test_engine_without_a_number_of_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^on=.* has nodes={nodes!r}, which must be a whole number from 1 on"):
        call(SimulatedEngine(nodes=nodes))


@pytest.mark.parametrize("placement", [None, "agents"])
def test_invalid_placement_is_refused(monkeypatch: pytest.MonkeyPatch, placement: Any) -> None:
    monkeypatch.setattr(SimulatedEngine, "place", lambda *_: placement)

    with pytest.raises(ConfigError, match=rf"returned {placement!r}, which has no method next_event: return an object"):
        call(SimulatedEngine())


def test_placement_without_a_method_is_closed_before_its_agents_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine()
    monkeypatch.delattr(SimulatedEngine, "replace")

    with pytest.raises(ConfigError, match="has no method replace"):
        call(engine)
    assert engine.is_closed
    assert [] == engine.settings


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ("up", "which is not an event: return one of elasticlib.engines, or None"),
        (AgentUp(2, "h:1"), "whose place 2 is not one of the job: give the number of the agent's place, 0 to 1"),
        (AgentLost(-1, "gone"), "whose place -1 is not one"),
        (AgentOutput("h0", b""), "whose place 'h0' is not one"),  # type: ignore[arg-type]
        (AgentUp(0, None), "whose address is not str: None"),  # type: ignore[arg-type]
        (AgentUp(0, "h0:1", 7), "but the present agent there has number 0: give 0, and one more after each replace"),
        (AgentUp(0, "host"), "whose address is not host:port"),
        (AgentResult(0, "done"), "whose data is not bytes: 'done'"),  # type: ignore[arg-type]
        (AgentLost(0, "gone", None), "whose agent None is not a number"),  # type: ignore[arg-type]
        (EngineEnds(None), "whose why is not str: None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_event_ends_the_call_with_its_reason(event: Any, complaint: str) -> None:
    engine = SimulatedEngine(on_place=lambda place: event)

    with pytest.raises(ConfigError) as caught:
        call(engine)
    assert complaint in str(caught.value)
    assert engine.is_closed


def test_agent_that_keeps_the_number_of_the_lost_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the call would wait for the replacement until its limit."""

    def answer(_: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        return [AgentLost(1, "gone")] if place == 1 else []

    monkeypatch.setattr(SimulatedEngine, "replace", lambda self, place: self.events.put(AgentUp(place, "spare:1", 0)))

    with pytest.raises(ConfigError, match="but the present agent there has number 1: give 0, and one more"):
        call(SimulatedEngine(on_begin=answer))


@pytest.mark.timeout(60)
def test_exit_within_next_event_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEngine, "next_event", lambda self, timeout: sys.exit(3))

    with pytest.raises(SystemExit):
        call(SimulatedEngine())


def test_agents_end_if_the_engine_has_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine()
    monkeypatch.delattr(engine, "endpoint")

    with pytest.raises(AttributeError, match="endpoint"):
        call(engine)
    assert engine.is_closed


@pytest.mark.parametrize("method", ["stop", "close"])
def test_results_survive_an_error_of_the_engine_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(self: SimulatedEngine) -> None:
        raise OSError(f"no answer to {method}")

    monkeypatch.setattr(SimulatedEngine, method, fail)

    assert {0: "value 0", 1: "value 1"} == call(SimulatedEngine())
    assert any(f"no answer to {method}" in message for message in caplog.messages)


@pytest.mark.timeout(60)
def test_results_do_not_wait_for_a_next_event_that_never_returns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elasticlib.remote._remote_launch._JOIN_SECONDS", 0.2)
    # By its end the thread waits for an event again.
    monkeypatch.setattr(SimulatedEngine, "close", lambda self: threading.Event().wait(0.5))
    monkeypatch.setattr(SimulatedEngine, "next_event", lambda self, timeout: self.events.get())

    engine = SimulatedEngine()

    assert {0: "value 0", 1: "value 1"} == call(engine)
    engine.events.put(None)
    assert any(".next_event() did not" in message for message in caplog.messages)


@pytest.mark.timeout(60)
def test_engine_that_fails_after_the_results_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def answer(engine: SimulatedEngine, place: int, number: int) -> list[Any]:
        return [result(place), *([OSError("no answer")] if place else [])]

    engine = SimulatedEngine(on_begin=answer, ends_after_result=True)

    assert {0: "value 0", 1: "value 1"} == call(engine, LaunchConfig(shutdown_timeout=3600))
    assert ["SimulatedEngine.next_event() raised while agents ended: OSError('no answer')"] == caplog.messages


@pytest.mark.timeout(60)
def test_agents_whose_ends_are_not_reported_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elasticlib.remote._remote_launch._END_SECONDS", 0.2)

    assert {0: "value 0", 1: "value 1"} == call(
        SimulatedEngine(ends_after_result=True), LaunchConfig(shutdown_timeout=0)
    )
    assert ["no AgentLost of agents 0, 1 within 0.2 s of their stop: ends them"] == caplog.messages


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("method", "interrupts"), [("place", 1), ("send", 2), ("stop", 2), ("close", 2)])
def test_interrupts_end_a_call_whose_engine_blocks(
    monkeypatch: pytest.MonkeyPatch, method: str, interrupts: int
) -> None:
    def block(*_: object) -> None:
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the interrupt did not end this call")

    monkeypatch.setattr(SimulatedEngine, method, block)

    with pytest.raises(KeyboardInterrupt, match=rf"got SIGINT while SimulatedEngine\.{method}\(\)"):
        call(SimulatedEngine())


def test_outcome_that_cannot_be_read_is_a_loss() -> None:
    def answer(_: SimulatedEngine, place: int, number: int) -> list[EngineEvent]:
        return [AgentResult(place, b"[]\n", number)] if number == 0 and place == 1 else [result(place, number)]

    engine = SimulatedEngine(on_begin=answer)

    with pytest.raises(StartError, match="results of 1 of 2 ranks are lost: the outcome of agent 1 cannot be read"):
        call(engine)


def test_error_of_the_engine_itself_is_raised() -> None:
    engine = SimulatedEngine(on_begin=lambda *_: [])
    engine.events.put(OSError("no more"))

    with pytest.raises(OSError, match="no more"):
        call(engine)
    assert engine.is_closed


def test_job_that_is_stopped_stops_its_agents() -> None:
    engine = SimulatedEngine(on_begin=lambda *_: [])
    job = elastic_launch(LaunchConfig(), train, on=engine).start()

    job.stop()

    with pytest.raises(SignalException, match=r"stopped by Job.stop\(\)"):
        job.result(60)
    assert engine.is_closed


@pytest.mark.timeout(60)
def test_third_interrupt_ends_the_wait_for_a_job_whose_engine_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, over = threading.Event(), threading.Event()

    def block(self: SimulatedEngine, agents: int, command: AgentCommand) -> SimulatedEngine:
        entered.set()
        over.wait(60)
        raise StartError("no machines")

    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not before, 30, "the program waits for the job")
        for _ in range(3):
            over.wait(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SimulatedEngine, "place", block)
    job = elastic_launch(LaunchConfig(), train, on=SimulatedEngine()).start()
    entered.wait(30)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="it waited for job 'train', which is being stopped"):
            job.result()
    finally:
        over.set()
        sender.join()
    with pytest.raises(StartError):
        job.result()
