"""The door for ``torch.distributed.elastic.multiprocessing.errors.error_handler``."""

from elasticlib.workers.record import ErrorHandler

__all__ = ["ErrorHandler"]
