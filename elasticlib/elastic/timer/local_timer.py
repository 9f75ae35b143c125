"""A door: timers over a multiprocessing queue. (torch: ``torch.distributed.elastic.timer.local_timer``)"""

from elasticlib.timer._queue import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
