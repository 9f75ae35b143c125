"""Re-export: ``torch.distributed.elastic.control_plane``."""

from elasticlib.workers.child._record import TORCH_WORKER_SERVER_SOCKET, worker_main

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]
