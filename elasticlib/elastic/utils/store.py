"""Re-export: ``torch.distributed.elastic.utils.store``."""

from elasticlib.utils.store import barrier, get_all, store_timeout, synchronize

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
