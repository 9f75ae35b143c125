"""Telemetry of an agent's work: its records, their order and their durations."""

from __future__ import annotations

import ast
import itertools
import logging
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from elasticlib import events, metrics, records
from elasticlib.agent import SimpleElasticAgent
from elasticlib.agent._telemetry import trace_of
from elasticlib.errors import ProcessFailure, RendezvousTimeoutError, SignalException, StartError, UnknownNameError
from elasticlib.events import _destinations
from elasticlib.metrics import _metric_streams
from elasticlib.rendezvous import Rendezvous, Rules, open_local
from elasticlib.spec import WorkerSpec
from elasticlib.state import RunResult, WorkerGroup, WorkerState

HEALTHY = RunResult(WorkerState.HEALTHY)
SUCCEEDED = RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"})
FAILED = RunResult(
    WorkerState.FAILED, {}, {1: ProcessFailure(1, 1001, 7, "", message="a bad value", rank=1, timestamp=1.0)}
)


class Scripted(SimpleElasticAgent):
    """Its workers behave as *looks* tell, round after round."""

    def __init__(self, spec: WorkerSpec, rounds: Sequence[Sequence[RunResult]], **options: Any) -> None:
        self.reported: list[records.Record] = []
        super().__init__(spec, sink=self.reported.append, **options)
        self.rounds = [list(looks) for looks in rounds]
        self.at_look: Callable[[], None] = lambda: None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        if not self.rounds:
            raise StartError("no more processes")
        self.looks = self.rounds.pop(0)
        return {worker.local_rank: 1000 + worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        pass

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.at_look()
        return self.looks.pop(0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        pass


Make = Callable[..., Scripted]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[Rendezvous] = []

    def new(
        *rounds: Sequence[RunResult], restarts: int = 0, kind: type[Scripted] = Scripted, **settings: Any
    ) -> Scripted:
        opened.append(open_local("job", Rules(max_restarts=restarts)))
        options = {"clock": settings.pop("clock")} if "clock" in settings else {}
        spec = WorkerSpec(
            "trainer",
            2,
            opened[-1],
            entrypoint="train.py",
            max_restarts=restarts,
            monitor_interval=0.001,
            local_addr="node7",
            **settings,
        )
        return kind(spec, rounds, **options)

    yield new
    for rendezvous in opened:
        rendezvous.close()


@pytest.fixture(autouse=True)
def former_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_metric_streams, "_handlers", dict(_metric_streams._handlers))
    before = dict(_destinations.handlers)
    yield
    _destinations.handlers.clear()
    _destinations.handlers.update(before)


def of_kind(agent: Scripted, *kinds: type[Any]) -> list[Any]:
    return [record for record in agent.reported if isinstance(record, kinds)]


def steps(agent: Scripted) -> list[tuple[str, bool]]:
    return [
        (each.step.removeprefix("SimpleElasticAgent."), each.succeeded) for each in of_kind(agent, records.StepDone)
    ]


def ends(agent: Scripted) -> list[tuple[int, str]]:
    return [(each.worker.global_rank, each.state) for each in of_kind(agent, records.WorkerEnded)]


def test_run_is_recorded_from_the_join_request_to_its_end(make: Make) -> None:
    agent = make([HEALTHY, SUCCEEDED])

    agent.run()

    assert [type(record) for record in agent.reported if not isinstance(record, records.StepDone)] == [
        records.RanksAwaited,
        records.RanksReceived,
        records.RanksAssigned,
        records.RoundStarted,
        records.WorkerStarted,
        records.WorkerStarted,
        records.WorkersSeen,
        records.WorkersSeen,
        records.WorkerEnded,
        records.WorkerEnded,
        records.RunEnded,
    ]


def test_each_worker_is_recorded_with_its_ranks_and_its_id(make: Make) -> None:
    agent = make([SUCCEEDED])

    agent.run()

    assert [each.worker for each in of_kind(agent, records.WorkerStarted)] == [
        records.WorkerPlace(0, 0, 0, 2, 1000),
        records.WorkerPlace(1, 1, 1, 2, 1001),
    ]
    assert ends(agent) == [(0, "SUCCEEDED"), (1, "SUCCEEDED")]


def test_worker_stopped_with_the_others_is_recorded_as_terminated(make: Make) -> None:
    agent = make([FAILED])

    agent.run()

    assert ends(agent) == [(0, "TERMINATED"), (1, "FAILED")]
    assert of_kind(agent, records.WorkerEnded)[1].failure.message == "a bad value"


def test_workers_of_each_round_are_recorded_as_ended_once(make: Make) -> None:
    agent = make([FAILED], [HEALTHY, SUCCEEDED], restarts=1)

    agent.run()

    assert ends(agent) == [(0, "TERMINATED"), (1, "FAILED"), (0, "SUCCEEDED"), (1, "SUCCEEDED")]
    assert [each.remaining_restarts for each in of_kind(agent, records.WorkersSeen)] == [1, 0, 0]
    assert of_kind(agent, records.RunEnded) == [records.RunEnded("SUCCEEDED", 1, 1, pytest.approx(0, abs=60))]


def test_workers_stopped_by_a_signal_are_recorded_as_terminated(make: Make) -> None:
    agent = make([HEALTHY] * 1000)
    agent.at_look = lambda: signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SignalException):
        agent.run()

    assert ends(agent) == [(0, "TERMINATED"), (1, "TERMINATED")]
    assert [each.outcome for each in of_kind(agent, records.RunEnded)] == ["RAISED"]


def test_workers_not_started_because_of_a_signal_are_not_recorded(make: Make) -> None:
    class Interrupted(Scripted):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            super()._start_workers(worker_group)
            signal.raise_signal(signal.SIGTERM)
            return {}

    agent = make([HEALTHY] * 1000, kind=Interrupted)

    with pytest.raises(SignalException):
        agent.run()

    assert of_kind(agent, records.WorkerStarted, records.WorkerEnded) == []


def test_steps_have_torchs_names(make: Make) -> None:
    agent = make([FAILED], [SUCCEEDED], restarts=1)

    agent.run()

    assert steps(agent) == [
        ("Scripted._start_workers", True),
        ("_initialize_workers", True),
        ("Scripted._monitor_workers", True),
        ("Scripted._stop_workers", True),
        ("Scripted._start_workers", True),
        ("_initialize_workers", True),
        ("_restart_workers", True),
        ("Scripted._monitor_workers", True),
        ("run", True),
    ]


def test_step_that_raises_is_recorded_as_failed_with_enclosing_steps(make: Make) -> None:
    agent = make()

    with pytest.raises(StartError):
        agent.run()

    assert steps(agent) == [("Scripted._start_workers", False), ("_initialize_workers", False), ("run", False)]
    assert of_kind(agent, records.WorkerEnded) == []


def test_a_hook_that_measures_itself_is_not_measured_twice(make: Make) -> None:
    class Measured(Scripted):
        @metrics.prof
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            return super()._start_workers(worker_group)

    agent = make([SUCCEEDED], kind=Measured)

    agent.run()

    assert [name for name, _ in steps(agent)] == ["_initialize_workers", "Scripted._monitor_workers", "run"]


def test_durations_are_of_the_given_clock(make: Make) -> None:
    agent = make([SUCCEEDED], clock=itertools.count(100.0, 10.0).__next__)

    agent.run()

    (assignment,), (ranks,) = of_kind(agent, records.RanksReceived), of_kind(agent, records.RanksAssigned)
    (initialized,) = (
        each for each in of_kind(agent, records.StepDone) if each.step == "SimpleElasticAgent._initialize_workers"
    )
    assert (assignment.duration, ranks.duration) == (10.0, 10.0)
    # Run, wish, seat, ranks from and to, start from and to, done: each looks at the clock once.
    assert initialized.duration == 60.0
    assert of_kind(agent, records.RunEnded)[0].duration == 100.0


def test_missing_ranks_are_recorded_with_the_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()

    def nobody() -> list[Any]:
        raise RendezvousTimeoutError("nobody came")

    monkeypatch.setattr(agent._member, "drain", nobody)
    with pytest.raises(RendezvousTimeoutError):
        agent.run()

    (missed,) = of_kind(agent, records.RanksMissed)
    assert missed.why == "nobody came"
    assert "RendezvousTimeoutError: nobody came" in missed.trace
    assert steps(agent) == [("_initialize_workers", False), ("run", False)]


def test_a_spare_that_was_not_needed_has_missed_ranks_without_an_error(make: Make) -> None:
    agent = make([SUCCEEDED])
    agent.run()
    spare = Scripted(agent.get_worker_group().spec, [])

    spare.run()

    (missed,) = of_kind(spare, records.RanksMissed)
    assert missed.trace == ""
    assert [each.outcome for each in of_kind(spare, records.RunEnded)] == ["SUCCEEDED"]


# As events and metrics.


class Kept(logging.Handler):
    """Keeps the events that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[events.Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(events.Event.deserialize(record.msg))

    def states(self) -> list[str]:
        return [str(each.metadata["state"]) for each in self.events]


@pytest.fixture
def kept() -> Kept:
    handler = Kept()
    events.add_logging_handler("kept", handler)
    return handler


def test_standalone_agent_sends_events_to_the_handler_of_its_spec(make: Make, kept: Kept) -> None:
    agent = make([FAILED], [FAILED], restarts=1, event_log_handler="kept")

    agent.run()

    round_of_two = ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START"]
    assert kept.states() == [*round_of_two, *round_of_two, "TERMINATED", "FAILED"]
    assert {(each.metadata["run_id"], each.metadata["rdzv_backend"]) for each in kept.events} == {("job", "c10d")}
    assert {(each.metadata["role"], each.metadata["hostname"]) for each in kept.events} == {("trainer", "node7")}


def test_end_of_the_agent_is_recorded_by_its_caller(make: Make, kept: Kept) -> None:
    agent = make([SUCCEEDED], event_log_handler="kept")
    agent.run()
    before = kept.states()

    agent.conclude()
    agent.conclude(StartError("no more processes"))

    assert kept.states() == [*before, "SUCCEEDED", "FAILED"]
    assert "StartError: no more processes" in str(kept.events[-1].metadata["raw_error"])


def test_an_agent_makes_the_event_of_its_end_for_a_caller_to_record(make: Make) -> None:
    agent = make([SUCCEEDED])
    agent.run()

    try:
        raise ValueError("late")
    except ValueError:
        failed = agent.get_event_failed()
    succeeded = agent.get_event_succeeded()

    assert (succeeded.name, failed.name) == (
        "torchelastic.worker.status.SUCCEEDED",
        "torchelastic.worker.status.FAILED",
    )
    assert succeeded.metadata["group_rank"] == 0
    assert succeeded.metadata["raw_error"] is None
    assert "ValueError: late" in str(failed.metadata["raw_error"])
    assert succeeded.timestamp > 0


def test_a_state_of_ones_own_is_timed_however_it_ends(make: Make, kept: Kept) -> None:
    agent = make(event_log_handler="kept", clock=itertools.count(0.0, 1.5).__next__)

    with pytest.raises(ValueError, match="cold"), agent.record_duration("WARM_UP"):
        raise ValueError("cold")

    assert [(each.metadata["state"], each.metadata["duration_ms"]) for each in kept.events] == [("WARM_UP", 1500.0)]


def test_an_agent_refuses_a_destination_that_is_not_known(make: Make) -> None:
    with pytest.raises(UnknownNameError, match="'nowhere' is unknown"):
        make(event_log_handler="nowhere")


def test_handlers_that_raise_end_no_job(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class BrokenLog(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    class BrokenMetrics(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise OSError("no route")

    events.add_logging_handler("broken", BrokenLog())
    metrics.configure(BrokenMetrics(), "torchelastic")
    agent = make([HEALTHY, FAILED], [SUCCEEDED], restarts=1, event_log_handler="broken")

    result = agent.run()

    assert result.state is WorkerState.SUCCEEDED
    errors = [str(each.exc_info) for each in caplog.records if each.levelno == logging.ERROR]
    assert sorted("disk full" in each for each in errors) == [False, True]
    assert sorted("no route" in each for each in errors) == [False, True]


def test_metrics_of_an_agent_are_in_torchs_group(make: Make) -> None:
    class Values(metrics.MetricHandler):
        def __init__(self) -> None:
            self.found: dict[str, float] = {}

        def emit(self, metric_data: metrics.MetricData) -> None:
            self.found[metric_data.name] = metric_data.value

    metrics.configure(values := Values(), "torchelastic")

    make([HEALTHY, FAILED], [SUCCEEDED], restarts=3).run()

    assert values.found["workers.trainer.run_success_with_retries"] == 1
    assert values.found["workers.trainer.flakiness"] == 25
    assert values.found["workers.trainer.remaining_restarts"] == 2
    assert {"workers.trainer.healthy", "workers.trainer.failed", "workers.trainer.succeeded"} < set(values.found)
    assert {f"SimpleElasticAgent.{step}.duration.ms" for step in ("_rendezvous", "run")} < set(values.found)


# The text of a traceback, as threads of ours report it.


def chained() -> None:
    try:
        [1, 2][int("2")]
    except IndexError as error:
        raise ValueError("a cause") from error


def test_a_trace_is_pythons_without_its_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those need the line parsed, which CPython 3.11 cannot do in two threads at once."""
    with pytest.raises(ValueError) as caught:
        chained()
    error = caught.value
    pythons = "".join(traceback.format_exception(error))
    plain = [line for line in pythons.splitlines() if not line.strip() or set(line.strip()) - {"^", "~"}]

    def parsed(*_: Any, **__: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", parsed)
        text = trace_of(error)
    assert text.splitlines() == plain


def test_parts_of_a_group_have_no_markers_either() -> None:
    group: Any = getattr(__import__("builtins"), "ExceptionGroup", None)
    if group is None:
        pytest.skip("this Python has no exception groups")

    def fails(number: int) -> float:
        return 1 / number + len(str(number))

    try:
        fails(0)
    except ZeroDivisionError as error:
        part = error
    text = trace_of(group("several", [part]))
    assert "ZeroDivisionError: division by zero" in text
    assert "^" not in text
    assert "~" not in text
