"""The door for ``torch.distributed.elastic.multiprocessing.errors``: how a worker's failure is written and told."""

from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.workers.child._record import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
