"""Re-export: ``torch.distributed.elastic.timer.api``."""

from elasticlib.timer._ledger import TimerRequest
from elasticlib.timer._requests import RequestQueue, TimerClient, configure, expires
from elasticlib.timer._server import TimerServer

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
