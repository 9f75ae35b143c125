"""Re-export: ``torch.distributed.elastic.timer.local_timer``."""

from elasticlib.timer._api import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
