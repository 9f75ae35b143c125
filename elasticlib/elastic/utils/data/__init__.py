"""Re-export: ``torch.distributed.elastic.utils.data``."""

from typing import TYPE_CHECKING

from elasticlib import _lazy
from elasticlib.utils.data import CyclingIterator

if TYPE_CHECKING:
    from elasticlib.utils.data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__, __dir__, _ = _lazy.names(__name__, {"elasticlib.utils.data": "ElasticDistributedSampler"})
