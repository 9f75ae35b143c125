"""
The name under which torch's users know `ElasticDistributedSampler`: a door that imports torch only when it is used.

(torch: ``torch.distributed.elastic.utils.data.elastic_distributed_sampler``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    """The sampler, whose base class is torch's, imported at its first use."""
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler

    return ElasticDistributedSampler


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
