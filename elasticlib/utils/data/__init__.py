"""
Data for elastic training: samplers that go on in the middle of an epoch, iterators over many epochs.

(torch: ``torch.distributed.elastic.utils.data``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticlib import _lazy
from elasticlib.utils.data.cycling_iterator import CyclingIterator

if TYPE_CHECKING:
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__, __dir__, _ = _lazy.names(
    __name__,
    {"elasticlib.utils.data._torch_sampler": "ElasticDistributedSampler"},  # its base class is torch's
)
