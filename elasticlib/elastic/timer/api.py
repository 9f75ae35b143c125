"""Re-export: ``torch.distributed.elastic.timer.api``."""

from elasticlib.timer._requests import RequestQueue, TimerClient, configure, expires
from elasticlib.timer._server import TimerServer
from elasticlib.timer._timer_table import TimerRequest

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
