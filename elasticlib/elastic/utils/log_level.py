"""Re-export: ``torch.distributed.elastic.utils.log_level``."""

from elasticlib.utils.log_level import get_log_level

__all__ = ["get_log_level"]
