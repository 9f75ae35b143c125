"""The metrics that an agent's records make."""

from __future__ import annotations

import pytest

from elasticlib import metrics, records
from elasticlib.metrics import _metric_streams
from elasticlib.records import RanksAssigned, RanksMissed, RanksReceived, RunEnded, StepDone, WorkersSeen


def values(record: records.Record) -> dict[str, float]:
    return dict(metrics.MetricSink("trainer").values(record))


def ended(outcome: str, restarts: int, allowed: int) -> dict[str, float]:
    found = values(RunEnded(outcome, restarts, allowed, 1.0))  # type: ignore[arg-type]
    assert all(name.startswith("workers.trainer.") for name in found)
    return {name.removeprefix("workers.trainer."): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("outcome", "restarts", "counted"),
    [
        ("SUCCEEDED", 0, "run_success_no_retries"),
        ("SUCCEEDED", 2, "run_success_with_retries"),
        ("FAILED", 0, "run_failed_no_retries"),
        ("FAILED", 3, "run_failed_with_retries"),
    ],
)
def test_a_run_is_counted_as_one_of_four_kinds(outcome: str, restarts: int, counted: str) -> None:
    found = ended(outcome, restarts, 3)

    assert {name for name, value in found.items() if name != "flakiness" and value} == {"run_total", counted}
    assert set(found.values()) - {found["flakiness"]} <= {0, 1}
    assert len(found) == 6


@pytest.mark.parametrize(
    ("outcome", "restarts", "allowed", "flakiness"),
    [
        ("SUCCEEDED", 0, 3, 0),
        ("SUCCEEDED", 1, 3, 25),
        ("SUCCEEDED", 1, 2, 33),
        ("SUCCEEDED", 0, 0, 0),
        ("FAILED", 0, 3, 100),
    ],
)
def test_flakiness_is_the_share_of_attempts_used_up(outcome: str, restarts: int, allowed: int, flakiness: int) -> None:
    assert ended(outcome, restarts, allowed)["flakiness"] == flakiness


def test_a_run_without_a_result_is_not_counted() -> None:
    assert values(RunEnded("RAISED", 0, 3, 1.0)) == {}


def test_each_look_emits_the_state_and_the_remaining_restarts() -> None:
    assert values(WorkersSeen("HEALTHY", 2)) == {
        "workers.trainer.remaining_restarts": 2,
        "workers.trainer.healthy": 1,
    }


@pytest.mark.parametrize(
    ("record", "step", "how", "milliseconds"),
    [
        (RanksReceived(0, 0, 1, 2, 0, "h:1", "all there", 1.2345), "SimpleElasticAgent._rendezvous", "success", 1234),
        (RanksMissed("nobody came", 2.0), "SimpleElasticAgent._rendezvous", "failure", 2000),
        (RanksAssigned(0, (0, 1), 0.0019), "SimpleElasticAgent._assign_worker_ranks", "success", 1),
        (StepDone("LocalElasticAgent._start_workers", 0.5, True), "LocalElasticAgent._start_workers", "success", 500),
        (StepDone("SimpleElasticAgent.run", 3.0, False), "SimpleElasticAgent.run", "failure", 3000),
    ],
    ids=["seat", "no seat", "ranks", "step", "failed step"],
)
def test_step_emits_its_outcome_and_its_milliseconds(
    record: records.Record, step: str, how: str, milliseconds: int
) -> None:
    assert values(record) == {f"{step}.{how}": 1, f"{step}.duration.ms": milliseconds}


def test_values_go_where_the_program_sends_them_by_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_metric_streams, "_handlers", dict(_metric_streams._handlers))
    sink = metrics.MetricSink("trainer")

    sink(WorkersSeen("HEALTHY", 2))
    metrics.configure(metrics.ConsoleMetricHandler(), "torchelastic")
    sink(WorkersSeen("SUCCEEDED", 2))

    out = capsys.readouterr().out
    assert "[torchelastic]: workers.trainer.succeeded=1\n" in out
    assert "healthy" not in out


def test_a_launch_may_have_a_handler_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.MetricSink("trainer", metrics.ConsoleMetricHandler())(WorkersSeen("HEALTHY", 2))

    assert "workers.trainer.healthy=1\n" in capsys.readouterr().out
