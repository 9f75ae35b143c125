"""
A `DistributedSampler` that can start in the middle of an epoch.

Rules of this file: it imports torch, so only code that uses the sampler imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data.distributed import DistributedSampler

from elasticlib.errors import ConfigError

_T = TypeVar("_T", covariant=True)


class ElasticDistributedSampler(DistributedSampler[_T]):
    """
    Sampler of this rank's share of the indices from *start_index* on, shuffled by the epoch.

    The indices are those of ``torch.distributed.elastic.utils.data.ElasticDistributedSampler``. The
    epoch (`set_epoch`) seeds a permutation of the rest of *dataset*. The permutation is padded from
    its own start to a multiple of *num_replicas*, and the ranks get its indices in turn. The
    defaults of *num_replicas* and *rank* are those of the process group. A rest that is shorter
    than one index for each replica is repeated; torch fails in this case.

    Raises ``TypeError`` for a data set without a length, and `ConfigError` (a ``ValueError``) for a
    *start_index* outside it.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
    ) -> None:
        sized: object = dataset
        if not isinstance(sized, Sized):
            raise TypeError(f"dataset={dataset!r:.80} has no length: give a dataset with __len__")

        super().__init__(dataset, num_replicas=num_replicas, rank=rank)
        size = len(sized)
        if start_index >= size:
            raise ConfigError(f"start_index={start_index} must be below {size}, the size of the data set")

        self.start_index = start_index
        self.num_samples = -(-(size - start_index) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[_T]:
        """Return an iterator over the indices of this rank in this epoch."""
        order = torch.Generator()
        order.manual_seed(self.epoch)
        left = len(self.dataset) - self.start_index  # type: ignore[arg-type]
        indices = (torch.randperm(left, generator=order) + self.start_index).tolist()
        padded = itertools.islice(itertools.cycle(indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        """Return the number of indices for each rank in an epoch."""
        return self.num_samples


ElasticDistributedSampler.__module__ = "elasticlib.elastic.utils.data.elastic_distributed_sampler"
