"""Re-export: ``torch.distributed.elastic.control_plane``."""

from elasticlib.workers._control_plane import TORCH_WORKER_SERVER_SOCKET, worker_main

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]
