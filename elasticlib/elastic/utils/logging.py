"""Re-export: ``torch.distributed.elastic.utils.logging``."""

from elasticlib.utils.logging import get_logger

__all__ = ["get_logger"]
