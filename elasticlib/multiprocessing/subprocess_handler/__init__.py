"""One program at a time, started in a session of its own; for sets of workers there is `start_processes`."""

from elasticlib.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from elasticlib.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
