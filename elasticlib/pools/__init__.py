"""
Pools: workers that stay, with their process group, and answer calls in milliseconds.

Rules of this package: the workers of a pool are those of one job after the other (a crew): one that a call has spoilt
is replaced as a whole, since a rank that waits for another one in a collective can only be ended. Code and results
travel in memory that launcher and worker hand to each other, never through a store.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.pools._crew import PoolWorkers as PoolWorkers
    from elasticlib.pools._pool import Pool as Pool, pool as pool

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.pools._crew": "PoolWorkers",
        "elasticlib.pools._pool": "Pool pool",
    },
)
