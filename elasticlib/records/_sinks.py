"""
Where records go.

Rules of this file: a sink is a function of one record; what one raises never reaches the agent's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from elasticlib.records._of_agents import (
    AgentFailed,
    AgentSucceeded,
    RanksAssigned,
    RanksAwaited,
    RanksMissed,
    RanksReceived,
    RunEnded,
    StateTimed,
    StepDone,
    WorkerEnded,
    WorkersSeen,
    WorkerStarted,
)
from elasticlib.records._of_jobs import (
    HealthCheckReported,
    LaunchStarted,
    LogsCutOff,
    LogsKept,
    NotNeeded,
    OutcomeMissed,
    PreloadSkipped,
    RoundEnded,
    RoundStarted,
    SpawnerKilled,
    StopAwaited,
    ThreadsChosen,
    VariableIgnored,
    WatchdogReported,
    WorkerAsleep,
    WorkerLingers,
    WorkersCutOff,
    WorkerServersPlaced,
    WorkersStopping,
    WorkersSurvived,
    WorkerStuck,
)

_log = logging.getLogger("elasticlib")

Record: TypeAlias = (
    LaunchStarted
    | RanksAwaited
    | RanksReceived
    | RanksMissed
    | RanksAssigned
    | WorkerStarted
    | WorkerEnded
    | WorkersSeen
    | StepDone
    | StateTimed
    | RunEnded
    | AgentSucceeded
    | AgentFailed
    | RoundStarted
    | RoundEnded
    | WorkersStopping
    | NotNeeded
    | OutcomeMissed
    | SpawnerKilled
    | WorkersCutOff
    | WorkersSurvived
    | StopAwaited
    | WorkerStuck
    | ThreadsChosen
    | PreloadSkipped
    | LogsCutOff
    | LogsKept
    | WatchdogReported
    | WorkerAsleep
    | WorkerLingers
    | VariableIgnored
    | HealthCheckReported
    | WorkerServersPlaced
)
Sink: TypeAlias = Callable[[Record], None]


def log(record: Record) -> None:
    """Write *record* to the ``elasticlib`` logger at its own level."""
    _log.log(record.level, "%s", record)


def fan_out(*sinks: Sink) -> Sink:
    """One sink that hands each record to all *sinks*, in order; what one raises is logged, once, and stays there."""
    guarded = [_Guarded(sink) for sink in sinks]

    def all_of_them(record: Record) -> None:
        for sink in guarded:
            sink(record)

    return all_of_them


class _Guarded:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed = False

    def __call__(self, record: Record) -> None:
        try:
            self._sink(record)
        except Exception:
            if not self._failed:
                self._failed = True
                _log.exception(
                    "events, metrics or another sink of records failed at %r; the job goes on, "
                    "and further failures of it are not shown",
                    type(record).__name__,
                )
