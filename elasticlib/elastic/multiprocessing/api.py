"""Re-export: ``torch.distributed.elastic.multiprocessing.api``."""

from elasticlib.errors import SignalException
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.logs._redirects import get_std_cm
from elasticlib.spec import LogsDest, LogsSpecs, Std, to_map
from elasticlib.workers._context import MultiprocessContext, PContext, RunProcsResult, SubprocessContext

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "to_map",
]
