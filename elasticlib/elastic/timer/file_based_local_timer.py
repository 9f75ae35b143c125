"""Re-export: ``torch.distributed.elastic.timer.file_based_local_timer``."""

from elasticlib.timer._fifo_client import FileTimerClient, FileTimerRequest
from elasticlib.timer._fifo_server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
