"""Re-export: ``torch.distributed.elastic.multiprocessing.api``."""

from elasticlib import _lazy
from elasticlib.errors import SignalException as SignalException
from elasticlib.logs import DefaultLogsSpecs as DefaultLogsSpecs
from elasticlib.logs._redirects import get_std_cm as get_std_cm
from elasticlib.spec import LogsDest as LogsDest, LogsSpecs as LogsSpecs, Std as Std, to_map as to_map
from elasticlib.workers._context import (
    MultiprocessContext as MultiprocessContext,
    PContext as PContext,
    RunProcsResult as RunProcsResult,
    SubprocessContext as SubprocessContext,
)

_lazy.offer(__name__)
