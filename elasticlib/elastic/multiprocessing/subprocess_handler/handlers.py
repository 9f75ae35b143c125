"""Re-export: ``torch.distributed.elastic.multiprocessing.subprocess_handler.handlers``."""

from elasticlib.workers._subprocess_handler import get_subprocess_handler

__all__ = ["get_subprocess_handler"]
