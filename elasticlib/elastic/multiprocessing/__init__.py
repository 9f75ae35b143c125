"""Re-export: ``torch.distributed.elastic.multiprocessing``."""

from elasticlib import _lazy
from elasticlib.workers import (
    DefaultLogsSpecs as DefaultLogsSpecs,
    LogsDest as LogsDest,
    LogsSpecs as LogsSpecs,
    MultiprocessContext as MultiprocessContext,
    PContext as PContext,
    ProcessFailure as ProcessFailure,
    RunProcsResult as RunProcsResult,
    SignalException as SignalException,
    Std as Std,
    SubprocessContext as SubprocessContext,
    start_processes as start_processes,
    to_map as to_map,
)

_lazy.offer(__name__)
