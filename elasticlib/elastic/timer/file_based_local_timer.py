"""Re-export: ``torch.distributed.elastic.timer.file_based_local_timer``."""

from elasticlib.timer._fifo import FileTimerClient, FileTimerRequest, FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
