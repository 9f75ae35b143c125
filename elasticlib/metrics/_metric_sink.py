"""
Conversion of records to metrics with torch's names.

Rules of this file: records contain the measured values; this file only gives them names and units.
While the group has no handler, no metric is made.
"""

from __future__ import annotations

from elasticlib import records
from elasticlib.metrics._metric_streams import AGENTS, MetricHandler, MetricStream, NullMetricHandler, getStream

_AGENT = "SimpleElasticAgent"


class MetricSink:
    """
    Sink that puts metrics of *role*'s agent into the group ``torchelastic``.

    They go to *handler*, or to the handler that the program has configured by then.
    """

    def __init__(self, role: str, handler: MetricHandler | None = None) -> None:
        self._workers = f"workers.{role}"
        self._handler = handler

    def __call__(self, record: records.Record) -> None:
        """Put the metrics of *record*, if it has any."""
        stream = getStream(AGENTS) if self._handler is None else MetricStream(AGENTS, self._handler)
        if isinstance(stream.handler, NullMetricHandler):
            return
        for name, value in self.values(record):
            stream.add_value(name, value)

    def values(self, record: records.Record) -> list[tuple[str, float]]:
        """Return the names and values of the metrics in *record*."""
        match record:
            case records.RanksReceived():
                return _step(f"{_AGENT}._rendezvous", record.duration, True)
            case records.RanksMissed():
                return _step(f"{_AGENT}._rendezvous", record.duration, False)
            case records.RanksAssigned():
                return _step(f"{_AGENT}._assign_worker_ranks", record.duration, True)
            case records.StepDone():
                return _step(record.step, record.duration, record.succeeded)
            case records.WorkersSeen():
                return [
                    (f"{self._workers}.remaining_restarts", record.remaining_restarts),
                    (f"{self._workers}.{record.state.lower()}", 1),
                ]
            # A run that raised an error has no result to count.
            case records.RunEnded() if record.outcome != "RAISED":
                return self._of_run(record)
            case _:
                return []

    def _of_run(self, run: records.RunEnded) -> list[tuple[str, float]]:
        has_failed = run.outcome == "FAILED"
        left = max(0, run.max_restarts - run.restart_count)
        # torch's formula, in which the first attempt counts like a restart.
        flakiness = 100.0 if has_failed else 100.0 - 100.0 * (left + 1) / (run.max_restarts + 1)
        outcome = "failed" if has_failed else "success"
        retries = "with" if run.restart_count > 0 else "no"
        counts = {"flakiness": int(flakiness), "run_total": 1, **dict.fromkeys(_OUTCOMES, 0)}
        counts[f"run_{outcome}_{retries}_retries"] = 1
        return [(f"{self._workers}.{name}", value) for name, value in counts.items()]


_OUTCOMES = (
    "run_success_with_retries",
    "run_success_no_retries",
    "run_failed_with_retries",
    "run_failed_no_retries",
)
"""Metrics of a run; one of them is 1, the others are 0."""


def _step(name: str, seconds: float, succeeded: bool) -> list[tuple[str, float]]:
    return [(f"{name}.{'success' if succeeded else 'failure'}", 1), (f"{name}.duration.ms", int(seconds * 1000))]
