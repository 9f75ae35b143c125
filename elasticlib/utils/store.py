"""
Meetings of workers by way of a store: collect everybody's data, wait for everybody, say who did not come.

Rules of this file: the store is any of torch's; its time limit is as it was when a function returns or raises.
A prefix serves one meeting only, since what was written for it stays.

(torch: ``torch.distributed.elastic.utils.store``)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

MOST_NAMED = 16
"""Ranks that the error of a barrier names at most."""


@contextlib.contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """
    Let *store* wait *timeout* seconds for a key within the block; afterwards as long as before, come what may.

    (torch: ``torch.distributed.elastic.utils.store.store_timeout``, which forgets to after an exception)
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """
    The values of the keys ``prefix0`` to ``prefix<world_size - 1>``, once all are there, by rank.

    Rank 0, where the store may live, returns when all others have them, too. Raises torch's ``DistStoreError``
    (a ``RuntimeError``) after the store's time limit.
    """
    values = [bytes(value) for value in store.multi_get([f"{prefix}{each}" for each in range(world_size)])]
    done = _check_in(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([done])
    return values


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """
    Give *data* to all ranks and return everybody's, by rank; each rank calls this with a prefix used once.

    Raises as `get_all`, after *timeout* seconds.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """
    Return once *world_size* callers have come to this *key_prefix*, which serves once.

    After *barrier_timeout* seconds torch's ``DistStoreError`` (a ``RuntimeError``) is raised. Where all callers
    give their *rank*, the error of each of them says who is missing, at most 16 of them, in the words of
    *rank_tracing_decoder*; the store gets *trace_timeout* seconds to tell. Raises ``AssertionError`` for a
    decoder without a rank. (torch: the same, where rank 0 alone knows)
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError(f"rank_tracing_decoder={rank_tracing_decoder!r} needs a rank: give rank=, too")
    from torch.distributed import DistStoreError

    with store_timeout(store, barrier_timeout):
        if rank is not None:
            # Set this before the count, so that a caller that was counted is never called missing.
            store.set(_arrival(key_prefix, rank), b"1")
        last = _check_in(store, world_size, key_prefix)
        try:
            store.wait([last])
            return
        except DistStoreError as error:
            if rank is None:
                raise
            late = error
    with store_timeout(store, trace_timeout):
        try:
            missing = list(itertools.islice(_missing(store, key_prefix, range(world_size)), MOST_NAMED))
        except RuntimeError:
            # The store itself does not answer, and the first error says more.
            raise late from None
    names = ", ".join(map(rank_tracing_decoder or str, missing))
    raise DistStoreError(
        f"rank {rank} waited {barrier_timeout:g} s at the barrier {key_prefix} "
        f"(world_size={world_size}, missing_ranks=[{names}])"
    ) from late


def _arrival(prefix: str, rank: int) -> str:
    return f"{prefix}/arrived/{rank}"


def _check_in(store: Any, world_size: int, prefix: str) -> str:
    """Count one more caller; the key that is there once all were counted."""
    last = f"{prefix}/last"
    if store.add(f"{prefix}/count", 1) == world_size:
        store.set(last, b"1")
    return last


def _missing(store: Any, prefix: str, ranks: Sequence[int]) -> Iterator[int]:
    """Of *ranks*, those that have not arrived, in order; asks the store a few times for each that is taken."""
    if not ranks or store.check([_arrival(prefix, rank) for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
    else:
        middle = len(ranks) // 2
        yield from _missing(store, prefix, ranks[:middle])
        yield from _missing(store, prefix, ranks[middle:])


__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
