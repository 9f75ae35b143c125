"""
An iterator over many epochs.

(torch: ``torch.distributed.elastic.utils.data.cycling_iterator``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from typing_extensions import Self

_T = TypeVar("_T")


class CyclingIterator(Iterator[_T]):
    """
    Iterator over ``generator_fn(start_epoch)``, then over the next epoch, up to epoch ``n - 1``.

    It always includes *start_epoch*, even if *n* is not above it. An epoch may be empty. (torch:
    ``torch.distributed.elastic.utils.data.CyclingIterator``)
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[_T]], start_epoch: int = 0) -> None:
        self._n = n
        self._generator_fn = generator_fn
        self._epoch = start_epoch
        self._iter = generator_fn(start_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        while True:
            try:
                return next(self._iter)
            except StopIteration:
                if self._epoch + 1 >= self._n:
                    raise
            self._epoch += 1
            self._iter = self._generator_fn(self._epoch)


__all__ = ["CyclingIterator"]
