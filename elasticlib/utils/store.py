"""
Barriers and data exchange of workers through a store, with the missing ranks in errors.

Rules of this file: the store may be any of torch's. When a function returns or raises, the store's
timeout is restored. A prefix can be used only once, because its keys stay in the store.

(torch: ``torch.distributed.elastic.utils.store``)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

MOST_NAMED = 16
"""Maximum number of ranks in the error of a barrier."""


@contextlib.contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """
    Set the timeout of *store* to *timeout* seconds within the block, and restore it afterwards.

    (torch: ``torch.distributed.elastic.utils.store.store_timeout``, which does not restore it after
    an exception)
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """
    Wait for the keys ``prefix0`` to ``prefix<world_size - 1>`` and return their values by rank.

    Rank 0, which may host the store, returns when all others have the values too. Raises torch's
    ``DistStoreError`` (a ``RuntimeError``) after the store's timeout.
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
    Send *data* to all ranks and return the data of all, by rank.

    Each rank calls it with the same prefix, which can be used only once. Raises like `get_all`,
    after *timeout* seconds.
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
    Wait until *world_size* callers have called it with this *key_prefix*, which can be used only once.

    Raises torch's ``DistStoreError`` (a ``RuntimeError``) after *barrier_timeout* seconds. If all
    callers give their *rank*, each error names up to 16 missing ranks, formatted by
    *rank_tracing_decoder*; *trace_timeout* limits the seconds for finding them. Raises
    ``AssertionError`` for a decoder without a rank. (In torch, only rank 0 names missing ranks.)
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError(
            f"rank_tracing_decoder={rank_tracing_decoder!r} has no effect without a rank: give rank=, too"
        )

    from torch.distributed import DistStoreError

    with store_timeout(store, barrier_timeout):
        if rank is not None:
            # Set before the count, so that a caller that was counted is never reported as missing.
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
            # The store itself does not answer, and the first error is more useful.
            raise late from None

    names = ", ".join(map(rank_tracing_decoder or str, missing))
    raise DistStoreError(
        f"rank {rank} waited {barrier_timeout:g} s at the barrier {key_prefix} "
        f"(world_size={world_size}, missing_ranks=[{names}])"
    ) from late


def _arrival(prefix: str, rank: int) -> str:
    return f"{prefix}/arrived/{rank}"


def _check_in(store: Any, world_size: int, prefix: str) -> str:
    """Count one more caller; return the key that exists once all were counted."""
    last = f"{prefix}/last"
    if store.add(f"{prefix}/count", 1) == world_size:
        store.set(last, b"1")
    return last


def _missing(store: Any, prefix: str, ranks: Sequence[int]) -> Iterator[int]:
    """Yield those of *ranks* that have not arrived, in order, with a few requests for each."""
    if not ranks or store.check([_arrival(prefix, rank) for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
    else:
        # A check of several keys only says whether all of them exist, so halves are checked again.
        middle = len(ranks) // 2
        yield from _missing(store, prefix, ranks[:middle])
        yield from _missing(store, prefix, ranks[middle:])


__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
