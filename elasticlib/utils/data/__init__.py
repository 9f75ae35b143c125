"""
Data for elastic training: a sampler that starts in the middle of an epoch, an iterator over epochs.

(torch: ``torch.distributed.elastic.utils.data``)
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from elasticlib.utils.data.cycling_iterator import CyclingIterator as CyclingIterator

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.utils.data._torch_sampler": "ElasticDistributedSampler",
        "elasticlib.utils.data.cycling_iterator": "CyclingIterator",
    },
)
