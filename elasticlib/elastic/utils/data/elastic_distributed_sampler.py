"""
Re-export: ``torch.distributed.elastic.utils.data.elastic_distributed_sampler``.

It imports torch only when the name is used.
"""

from typing import TYPE_CHECKING

from elasticlib import _lazy

if TYPE_CHECKING:
    from elasticlib.utils.data._torch_sampler import ElasticDistributedSampler as ElasticDistributedSampler

__getattr__, __dir__, __all__ = _lazy.names(
    __name__, {"elasticlib.utils.data._torch_sampler": "ElasticDistributedSampler"}
)
