"""Re-export: ``torch.distributed.elastic.utils.data.cycling_iterator``."""

from elasticlib.utils.data.cycling_iterator import CyclingIterator

__all__ = ["CyclingIterator"]
