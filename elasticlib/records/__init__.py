"""
What happened: typed records, each made once and handed to a sink.

Rules of this room: a record holds facts; its text is made from them, where it is defined; a sink never raises into
the agent's loop (`fan_out`). `log` is the default sink; events and metrics are others.
"""

from elasticlib.records._of_agents import (
    FINE,
    AgentFailed,
    AgentSucceeded,
    RanksAssigned,
    RunEnded,
    SeatMissed,
    SeatSought,
    SeatTaken,
    StateTimed,
    StepDone,
    WorkerEnded,
    WorkerPlace,
    WorkersSeen,
    WorkerStarted,
)
from elasticlib.records._of_jobs import (
    HealthCheckTold,
    LaunchStarted,
    LogsKept,
    NotNeeded,
    PreloadSkipped,
    RoundEnded,
    RoundStarted,
    StopAwaited,
    ThreadsChosen,
    VariableIgnored,
    WatchdogTold,
    WorkerAsleep,
    WorkerServersPlaced,
    WorkersStopping,
    WorkersSurvived,
    WorkerStuck,
)
from elasticlib.records._sinks import Record, Sink, fan_out, log

__all__ = [
    "FINE",
    "AgentFailed",
    "AgentSucceeded",
    "HealthCheckTold",
    "LaunchStarted",
    "LogsKept",
    "NotNeeded",
    "PreloadSkipped",
    "RanksAssigned",
    "Record",
    "RoundEnded",
    "RoundStarted",
    "RunEnded",
    "SeatMissed",
    "SeatSought",
    "SeatTaken",
    "Sink",
    "StateTimed",
    "StepDone",
    "StopAwaited",
    "ThreadsChosen",
    "VariableIgnored",
    "WatchdogTold",
    "WorkerAsleep",
    "WorkerEnded",
    "WorkerPlace",
    "WorkerServersPlaced",
    "WorkerStarted",
    "WorkerStuck",
    "WorkersSeen",
    "WorkersStopping",
    "WorkersSurvived",
    "fan_out",
    "log",
]
