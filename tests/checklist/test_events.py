"""Rows 180 to 185: what agents tell as events and as metrics."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.checklist.peers import Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

LAUNCH = """
import json, logging, os, sys, time
from {elastic} import metrics
from {elastic}.events import handlers
from {distributed}.launcher.api import LaunchConfig, elastic_launch

class Values(metrics.MetricHandler):
    def emit(self, metric_data):
        with open("metrics.jsonl", "a") as file:
            file.write(json.dumps([metric_data.group_name, metric_data.name, metric_data.value]) + "\\n")

def one_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("a bad value")
    time.sleep(100)

if __name__ == "__main__":
    destination, restarts, worker = sys.argv[1:]
    handlers._log_handlers["file"] = logging.FileHandler("events.jsonl")
    metrics.configure(Values())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="job", role="trainer", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=int(restarts), monitor_interval=0.05, event_log_handler=destination,
    )
    try:
        if worker == "one_fails":
            elastic_launch(config, one_fails)()
        else:
            elastic_launch(config, sys.executable)("-c", worker)
    except Exception as error:
        print("KeyError" if isinstance(error, KeyError) else type(error).__name__)
    else:
        print("done")
"""
WELL = "pass"
FIRST_ROUND_FAILS = """
import os
raise SystemExit(7 * (os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
"""
METADATA = {
    *("run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state", "total_run_time"),
    *("rdzv_backend", "raw_error", "metadata", "agent_restarts", "duration_ms"),
}
OF_WORKERS = {"local_rank", "role_rank", "role_world_size", "exit_code", "worker_pid"}


def launched(peer: Peer, worker: str, *, destination: str = "file", restarts: int = 0) -> str:
    """Run two workers; how that ended."""
    done = peer.python(LAUNCH, destination, str(restarts), worker)
    assert done.returncode == 0, done.err
    return (done.out.splitlines() or [""])[-1]


def recorded(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The events of the launch, in their order."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def named(events: list[dict[str, Any]], state: str, source: str) -> list[dict[str, Any]]:
    name = f"torchelastic.worker.status.{state}"
    return [each["metadata"] for each in events if (each["name"], each["source"]) == (name, source)]


@pytest.mark.row(180)
def test_an_event_survives_json(peer: Peer) -> None:
    events = peer.module("events")
    event = events.Event("epoch", events.EventSource.WORKER, metadata={"number": 3, "share": 0.5, "why": None})

    text = event.serialize()

    assert json.loads(text) == {
        "name": "epoch",
        "source": "WORKER",
        "timestamp": 0,
        "metadata": {"number": 3, "share": 0.5, "why": None},
    }
    assert (events.Event.deserialize(text), str(event)) == (event, text)


@pytest.mark.row(180)
def test_names_and_keys_of_events_are_as_documented(peer: Peer, tmp_path: pathlib.Path) -> None:
    launched(peer, WELL)

    events = recorded(tmp_path)
    (agent,), started = named(events, "SUCCEEDED", "AGENT"), named(events, "START", "WORKER")
    assert [set(each["metadata"]) for each in events] == [METADATA] * len(events)
    assert (agent["run_id"], agent["role"], agent["rdzv_backend"]) == ("job", "trainer", "c10d")
    assert set(json.loads(agent["metadata"])) == {"group_world_size", "entry_point"}
    assert sorted(each["global_rank"] for each in started) == [0, 1]
    assert OF_WORKERS < set(json.loads(started[0]["metadata"]))
    assert len(named(events, "SUCCEEDED", "WORKER")) == 2


@pytest.mark.row(181)
def test_events_go_to_the_console_or_nowhere(peer: Peer) -> None:
    quiet = peer.python(LAUNCH, "null", "0", WELL)
    shown = peer.python(LAUNCH, "console", "0", WELL)

    assert "done" in quiet.out
    assert "torchelastic.worker.status" not in quiet.out + quiet.err
    assert '"name": "torchelastic.worker.status.START"' in shown.err


@pytest.mark.row(181)
def test_an_unknown_event_handler_is_a_key_error(peer: Peer) -> None:
    with pytest.raises(KeyError):
        peer.module("events").get_logging_handler("nowhere")

    assert launched(peer, WELL, destination="nowhere") == "KeyError"


@pytest.mark.row(182)
def test_rendezvous_and_rank_assignment_are_recorded_with_durations(peer: Peer, tmp_path: pathlib.Path) -> None:
    launched(peer, WELL)

    events = recorded(tmp_path)
    (rendezvous,) = named(events, "RENDEZVOUS", "AGENT")
    (ranks,) = named(events, "ASSIGN_WORKER_RANKS", "AGENT")
    assert 0 < ranks["duration_ms"] < 60_000
    assert 0 < rendezvous["duration_ms"] < 60_000


@pytest.mark.row(183)
def test_worker_stopped_by_the_agent_is_recorded_as_terminated(peer: Peer, tmp_path: pathlib.Path) -> None:
    ended = launched(peer, "one_fails")  # as a program, torch's stopped worker counts as failed by SIGTERM

    events = recorded(tmp_path)
    assert ended == "ChildFailedError"
    assert [each["global_rank"] for each in named(events, "TERMINATED", "WORKER")] == [0]
    assert [each["global_rank"] for each in named(events, "FAILED", "WORKER")] == [1]
    assert named(events, "SUCCEEDED", "WORKER") == []


@pytest.mark.row(184)
def test_measured_function_emits_its_outcome_and_its_duration(peer: Peer) -> None:
    metrics = peer.module("metrics")
    found: list[tuple[str, str, float]] = []

    class Kept(metrics.MetricHandler):  # type: ignore[misc, name-defined]
        def emit(self, metric_data: Any) -> None:
            found.append((metric_data.group_name, metric_data.name.rpartition(">.")[2], metric_data.value))

    class Loader:
        @metrics.prof  # type: ignore[untyped-decorator]
        def load(self) -> str:
            return "rows"

        @metrics.prof(group="mine")  # type: ignore[untyped-decorator]
        def fail(self) -> None:
            raise ValueError("no rows")

    for group in ("torchelastic", "mine"):
        metrics.configure(Kept(), group)
    try:
        assert Loader().load() == "rows"
        with pytest.raises(ValueError, match="no rows"):
            Loader().fail()
    finally:
        for group in ("torchelastic", "mine"):
            metrics.configure(metrics.NullMetricHandler(), group)

    assert [(group, name) for group, name, _ in found] == [
        ("torchelastic", "Loader.load.success"),
        ("torchelastic", "Loader.load.duration.ms"),
        ("mine", "Loader.fail.failure"),
        ("mine", "Loader.fail.duration.ms"),
    ]
    assert [value for _, name, value in found if not name.endswith(".ms")] == [1, 1]


@pytest.mark.row(185)
def test_a_run_is_counted_and_its_restarts_are_its_flakiness(peer: Peer, tmp_path: pathlib.Path) -> None:
    ended = launched(peer, FIRST_ROUND_FAILS, restarts=3)

    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    values = {name: value for group, name, value in metrics if group == "torchelastic"}
    assert ended == "done"
    mine = {
        name.removeprefix("workers.trainer."): value for name, value in values.items() if name.startswith("workers.")
    }
    mine.pop("healthy", None)  # whether they were seen while they ran depends on how quick they were
    assert mine == {
        "run_total": 1,
        "run_success_with_retries": 1,
        "run_success_no_retries": 0,
        "run_failed_with_retries": 0,
        "run_failed_no_retries": 0,
        "flakiness": 25,
        "remaining_restarts": 2,
        "failed": 1,
        "succeeded": 1,
    }
    assert {"SimpleElasticAgent._rendezvous.success", "LocalElasticAgent._start_workers.duration.ms"} < set(values)
