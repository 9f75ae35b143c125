"""Re-export: ``torch.distributed.elastic.timer``."""

from elasticlib import _lazy
from elasticlib.timer import (
    FileTimerClient as FileTimerClient,
    FileTimerRequest as FileTimerRequest,
    FileTimerServer as FileTimerServer,
    LocalTimerClient as LocalTimerClient,
    LocalTimerServer as LocalTimerServer,
    TimerClient as TimerClient,
    TimerRequest as TimerRequest,
    TimerServer as TimerServer,
    configure as configure,
    expires as expires,
)

_lazy.offer(__name__)
