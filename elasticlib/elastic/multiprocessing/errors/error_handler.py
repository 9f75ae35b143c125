"""Re-export: ``torch.distributed.elastic.multiprocessing.errors.error_handler``."""

from elasticlib.workers.child._record import ErrorHandler

__all__ = ["ErrorHandler"]
