"""
Data for elastic training: samplers that go on in the middle of an epoch, iterators over many epochs.

(torch: ``torch.distributed.elastic.utils.data``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticlib.utils.data.cycling_iterator import CyclingIterator

if TYPE_CHECKING:
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    """The sampler, whose base class is torch's, imported at its first use."""
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler

    return ElasticDistributedSampler


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
