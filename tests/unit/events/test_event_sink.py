"""The events that an agent's records make, and who gets to see them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib import events, records
from elasticlib.errors import ProcessFailure, UnknownNameError
from elasticlib.events import _destinations
from elasticlib.events._event_sink import EventSink, JobFacts, RendezvousSink, sinks
from elasticlib.records import (
    AgentFailed,
    AgentSucceeded,
    RanksAssigned,
    RanksAwaited,
    RanksMissed,
    RanksReceived,
    RoundEnded,
    RoundStarted,
    RunEnded,
    StateTimed,
    WatchdogReported,
    WorkerEnded,
    WorkerPlace,
    WorkerStarted,
)

JOB = JobFacts("job", "trainer", "c10d", "train.py", "node7")
SEAT = RanksReceived(3, 1, 2, 4, 1, "node6:29500", "all 2 nodes have joined", 1.5)
FIRST = WorkerPlace(0, 2, 2, 4, 1000)
SECOND = WorkerPlace(1, 3, 3, 4, 1001)
METADATA = {
    "run_id",
    "global_rank",
    "group_rank",
    "worker_id",
    "role",
    "hostname",
    "state",
    "total_run_time",
    "rdzv_backend",
    "raw_error",
    "metadata",
    "agent_restarts",
    "duration_ms",
}


class Kept(logging.Handler):
    """Keeps what it gets, as dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.msg))

    def states(self) -> list[str]:
        return [each["name"].removeprefix("torchelastic.worker.status.") for each in self.events]


@pytest.fixture(autouse=True)
def former_handlers() -> Iterator[None]:
    before = dict(_destinations.handlers)
    yield
    _destinations.handlers.clear()
    _destinations.handlers.update(before)


@pytest.fixture
def kept() -> Kept:
    """Takes the events of the destination ``kept``."""
    handler = Kept()
    events.add_logging_handler("kept", handler)
    return handler


@pytest.fixture
def sink(kept: Kept) -> EventSink:
    return EventSink(JOB, "kept", now=lambda: 1700000000.25)


def failure(**facts: Any) -> ProcessFailure:
    return ProcessFailure(1, 1001, 7, "", message="a bad value", **facts)


def test_event_has_the_same_fields_as_torchs(sink: EventSink, kept: Kept) -> None:
    sink(SEAT)

    (event,) = kept.events
    assert (event["name"], event["source"]) == ("torchelastic.worker.status.RENDEZVOUS", "AGENT")
    assert set(event["metadata"]) == METADATA
    assert {**event["metadata"], "metadata": json.loads(event["metadata"]["metadata"])} == {
        "run_id": "job",
        "global_rank": None,
        "group_rank": 1,
        "worker_id": None,
        "role": "trainer",
        "hostname": "node7",
        "state": "RENDEZVOUS",
        "total_run_time": 0,
        "rdzv_backend": "c10d",
        "raw_error": None,
        "metadata": {"group_world_size": 2, "entry_point": "train.py"},
        "agent_restarts": 1,
        "duration_ms": 1500.0,
    }


def test_an_event_has_its_time_in_milliseconds(sink: EventSink, kept: Kept) -> None:
    sink(SEAT)

    assert kept.events[0]["timestamp"] == 1700000000250


def test_event_of_a_worker_holds_its_ranks_as_plain_values(sink: EventSink, kept: Kept) -> None:
    sink(SEAT)
    sink(WorkerStarted(SECOND))

    event = kept.events[1]
    more = json.loads(event["metadata"]["metadata"])
    assert (event["name"], event["source"]) == ("torchelastic.worker.status.START", "WORKER")
    assert (event["metadata"]["global_rank"], event["metadata"]["worker_id"]) == (3, "1001")
    assert (more["local_rank"], more["role_rank"], more["role_world_size"]) == (1, 3, 4)
    assert (more["exit_code"], more["worker_pid"]) == (None, 1001)


def test_durations_of_states_are_recorded_in_milliseconds(sink: EventSink, kept: Kept) -> None:
    sink(RanksAssigned(3, (2, 3), 0.25))
    sink(StateTimed("WARM_UP", 2.0))
    sink(RanksMissed("nobody came", 600.0))

    assert kept.states() == ["ASSIGN_WORKER_RANKS", "WARM_UP", "RENDEZVOUS"]
    assert [each["metadata"]["duration_ms"] for each in kept.events] == [250.0, 2000.0, 600000.0]


def test_ends_of_workers_are_recorded_at_the_end_of_the_run(sink: EventSink, kept: Kept) -> None:
    sink(SEAT)
    sink(WorkerEnded(FIRST, "TERMINATED"))
    sink(WorkerEnded(SECOND, "FAILED", failure()))
    before = kept.states()

    sink(RunEnded("FAILED", 1, 3, 61.9))

    assert before == ["RENDEZVOUS"]
    assert kept.states() == ["RENDEZVOUS", "TERMINATED", "FAILED"]
    assert [each["metadata"]["total_run_time"] for each in kept.events] == [0, 61, 61]


def test_worker_ends_of_a_round_with_a_successor_are_not_recorded(sink: EventSink, kept: Kept) -> None:
    sink(WorkerEnded(FIRST, "TERMINATED"))
    sink(SEAT)
    sink(WorkerEnded(FIRST, "SUCCEEDED"))

    sink(RunEnded("SUCCEEDED", 1, 3, 1.0))

    assert kept.states() == ["RENDEZVOUS", "SUCCEEDED"]


def test_failed_worker_is_recorded_with_exit_status_and_error_file(sink: EventSink, kept: Kept) -> None:
    sink(WorkerEnded(SECOND, "FAILED", failure(error_file_data={"message": {"message": "a bad value"}})))
    sink(RunEnded("FAILED", 0, 0, 1.0))

    metadata = kept.events[0]["metadata"]
    assert json.loads(metadata["raw_error"]) == {"message": {"message": "a bad value"}}
    assert json.loads(metadata["metadata"])["exit_code"] == 7
    assert json.loads(metadata["metadata"])["worker_pid"] == 1001


def test_failed_worker_without_error_file_is_recorded_with_message(sink: EventSink, kept: Kept) -> None:
    sink(WorkerEnded(SECOND, "FAILED", failure()))
    sink(RunEnded("FAILED", 0, 0, 1.0))

    assert json.loads(kept.events[0]["metadata"]["raw_error"]) == {"message": "a bad value"}


@pytest.mark.parametrize(
    ("state", "exit_code"),
    [("SUCCEEDED", 0), ("TERMINATED", None)],
)
def test_a_worker_that_did_not_fail_has_no_error(sink: EventSink, kept: Kept, state: Any, exit_code: int) -> None:
    sink(WorkerEnded(FIRST, state))
    sink(RunEnded("SUCCEEDED", 0, 0, 1.0))

    metadata = kept.events[0]["metadata"]
    assert metadata["raw_error"] is None
    assert json.loads(metadata["metadata"])["exit_code"] == exit_code


def test_end_of_an_agent_is_recorded_with_its_error(sink: EventSink, kept: Kept) -> None:
    sink(AgentSucceeded())
    sink(AgentFailed("Traceback ...\nRendezvousTimeoutError: nobody came"))

    assert kept.states() == ["SUCCEEDED", "FAILED"]
    assert [each["metadata"]["raw_error"] for each in kept.events] == [
        None,
        "Traceback ...\nRendezvousTimeoutError: nobody came",
    ]


def test_the_watchdog_has_names_of_its_own(sink: EventSink, kept: Kept) -> None:
    sink(SEAT)
    sink(WatchdogReported("watchdog started"))
    sink(WatchdogReported("timer expired", 1000, "train.py#7", 1700000001.5, 9))

    started, expired = kept.events[1:]
    assert (started["name"], started["source"], started["metadata"]["state"]) == (
        "watchdog started",
        "AGENT",
        "RUNNING",
    )
    assert expired["name"] == "timer expired"
    assert set(expired["metadata"]) == METADATA - {"duration_ms"}
    assert json.loads(started["metadata"]["metadata"])["watchdog_event"] == "watchdog started"
    assert json.loads(expired["metadata"]["metadata"]) == {
        "watchdog_event": "timer expired",
        "worker_pid": "1000",
        "scope_id": "train.py#7",
        "expiration_time": "1700000001.5",
        "signal": "9",
    }


# Events of the rendezvous.

WAY = [
    RanksAwaited("node7/1-a"),
    SEAT,
    RoundStarted(3, 1, 2, 4, 1, 3, "node6:29500", {0: 1000, 1: 1001}, "all 2 nodes have joined"),
    RoundEnded(3, "rank 0 failed", restart=True),
    RanksAwaited("node7/1-a"),
    RanksMissed("nobody came", 600.0, "Traceback ..."),
]


def test_each_step_into_and_out_of_a_round_is_recorded() -> None:
    handler = Kept()
    events.add_logging_handler("dynamic_rendezvous", handler)
    sink = RendezvousSink(JOB)

    for record in WAY:
        sink(record)

    assert [(each["name"], each["node_state"], each["rank"]) for each in handler.events] == [
        ("agent:wait_for_ranks", "INIT", None),
        ("agent:get_ranks", "SUCCEEDED", 1),
        ("agent:start_round", "RUNNING", 1),
        ("agent:end_round", "RUNNING", 1),
        ("agent:wait_for_ranks", "INIT", None),
        ("agent:wait_for_ranks", "FAILED", None),
    ]
    assert [each["message"] for each in handler.events] == [str(record) for record in WAY]
    assert handler.events[1]["master_endpoint"] == "node6:29500"
    assert handler.events[-1]["error_trace"] == "Traceback ..."
    assert {(each["run_id"], each["hostname"]) for each in handler.events} == {("job", "node7")}


def test_records_that_are_not_rendezvous_steps_are_left_out() -> None:
    handler = Kept()
    events.add_logging_handler("dynamic_rendezvous", handler)

    RendezvousSink(JOB)(WorkerStarted(FIRST))

    assert handler.events == []


# Who gets to see what.


def report_all(destination: str) -> None:
    """Send all records to the sinks for *destination*."""
    for sink in sinks(lambda: JOB, destination):
        for record in [*WAY, RunEnded("SUCCEEDED", 1, 3, 1.0)]:
            sink(record)


def test_without_a_destination_nothing_is_made() -> None:
    facts: list[JobFacts] = []

    assert sinks(lambda: facts.append(JOB) or JOB, "null") == []  # type: ignore[func-returns-value]
    assert facts == []


def test_a_destination_gets_no_events_of_the_rendezvous(kept: Kept) -> None:
    report_all("kept")

    assert kept.states() == ["RENDEZVOUS", "RENDEZVOUS"]


def test_a_rendezvous_handler_gets_its_events_with_any_destination(kept: Kept) -> None:
    events.add_logging_handler("dynamic_rendezvous", other := Kept())

    report_all("null")

    assert len(other.events) == len(WAY)
    assert kept.events == []


def test_the_rendezvous_destination_shows_its_own_events_and_the_agents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its handler drops everything until somebody replaces it: the console stands in."""
    report_all("dynamic_rendezvous")

    names = [json.loads(line)["name"] for line in capsys.readouterr().err.splitlines()]
    assert names.count("torchelastic.worker.status.RENDEZVOUS") == 2
    assert "agent:get_ranks" in names


def test_a_handler_of_the_rendezvous_destination_replaces_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events.add_logging_handler("dynamic_rendezvous", handler := Kept())

    report_all("dynamic_rendezvous")

    assert len(handler.events) == len(WAY) + 2
    assert capsys.readouterr().err == ""


def test_an_unknown_destination_is_refused_before_anything_happens() -> None:
    with pytest.raises(UnknownNameError, match="'nowhere' is unknown"):
        sinks(lambda: JOB, "nowhere")


def test_a_handler_that_raises_is_reported_once_and_others_go_on(caplog: pytest.LogCaptureFixture, kept: Kept) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    events.add_logging_handler("broken", Broken())
    sink = records.fan_out(EventSink(JOB, "broken"), EventSink(JOB, "kept"))

    sink(SEAT)
    sink(SEAT)

    assert len(kept.events) == 2
    (entry,) = (each for each in caplog.records if each.name == "elasticlib")
    assert "the job continues" in entry.getMessage()
    assert "disk full" in str(entry.exc_info)
