"""Re-export: ``torch.distributed.elastic.multiprocessing.errors.handlers``."""

from elasticlib.workers.child._record import get_error_handler

__all__ = ["get_error_handler"]
