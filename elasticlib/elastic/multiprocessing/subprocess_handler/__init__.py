"""Re-export: ``torch.distributed.elastic.multiprocessing.subprocess_handler``."""

from elasticlib.workers._subprocess_handler import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
