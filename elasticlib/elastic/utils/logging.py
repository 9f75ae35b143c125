"""Re-export: ``torch.distributed.elastic.utils.logging``."""

from elasticlib.utils.log_level import get_logger

__all__ = ["get_logger"]
