"""Re-export: ``torch.distributed.elastic.timer.api``."""

from elasticlib.timer._api import RequestQueue, TimerClient, TimerServer, configure, expires
from elasticlib.timer._timer_table import TimerRequest

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
