"""Re-export: ``torch.distributed.elastic.timer.local_timer``."""

from elasticlib.timer._queue import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
