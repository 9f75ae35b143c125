"""Re-export: ``torch.distributed.elastic.multiprocessing.errors``."""

from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.workers.child._record import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
