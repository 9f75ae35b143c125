"""
Typed records about a job and its agents, each made once and passed to a sink.

Rules of this package: a record has facts, and its class makes the text from them. An error of a
sink never reaches the agent's loop (`fan_out`). `log` is the default sink; events and metrics are
others.
"""

from elasticlib import _lazy
from elasticlib.records._of_agents import (
    FINE as FINE,
    AgentFailed as AgentFailed,
    AgentSucceeded as AgentSucceeded,
    KernelLimited as KernelLimited,
    RanksAssigned as RanksAssigned,
    RanksAwaited as RanksAwaited,
    RanksMissed as RanksMissed,
    RanksReceived as RanksReceived,
    RunEnded as RunEnded,
    StacksReported as StacksReported,
    StacksShown as StacksShown,
    StateTimed as StateTimed,
    StepDone as StepDone,
    WorkerEnded as WorkerEnded,
    WorkerPlace as WorkerPlace,
    WorkersSeen as WorkersSeen,
    WorkerStarted as WorkerStarted,
)
from elasticlib.records._of_helpers import (
    HelperHeld as HelperHeld,
    HelperLost as HelperLost,
    HelperReplaced as HelperReplaced,
    HelperWoken as HelperWoken,
    SpawnerKilled as SpawnerKilled,
)
from elasticlib.records._of_jobs import (
    DetachedEnded as DetachedEnded,
    GpuMemoryFree as GpuMemoryFree,
    GpuMemoryHeld as GpuMemoryHeld,
    GpuMemoryUnknown as GpuMemoryUnknown,
    HealthCheckReported as HealthCheckReported,
    ImportTakesLong as ImportTakesLong,
    LastRuns as LastRuns,
    LaunchStarted as LaunchStarted,
    LogsCutOff as LogsCutOff,
    LogsKept as LogsKept,
    NotNeeded as NotNeeded,
    OutcomeMissed as OutcomeMissed,
    PreloadAdvised as PreloadAdvised,
    PreloadSkipped as PreloadSkipped,
    RoundEnded as RoundEnded,
    RoundStarted as RoundStarted,
    StopAwaited as StopAwaited,
    StopRepeated as StopRepeated,
    StreamsKept as StreamsKept,
    ThreadsChosen as ThreadsChosen,
    VariableIgnored as VariableIgnored,
    WatchdogReported as WatchdogReported,
    WorkerAsleep as WorkerAsleep,
    WorkerCrashedLate as WorkerCrashedLate,
    WorkerLingers as WorkerLingers,
    WorkersAsked as WorkersAsked,
    WorkersCutOff as WorkersCutOff,
    WorkerServersPlaced as WorkerServersPlaced,
    WorkersStopping as WorkersStopping,
    WorkersSurvived as WorkersSurvived,
    WorkerStuck as WorkerStuck,
)
from elasticlib.records._sinks import Record as Record, Sink as Sink, fan_out as fan_out, log as log

_lazy.offer(__name__)
