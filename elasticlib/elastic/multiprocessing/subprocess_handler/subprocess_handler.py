"""Re-export: ``torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler``."""

from elasticlib.workers._subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler"]
