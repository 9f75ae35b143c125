"""
Pools: workers that stay, with their process group, and answer calls in milliseconds.

Rules of this package: the workers of a pool belong to one job. If one of them cannot serve another
call, a new job replaces all of them: a rank that waits for another one in a collective can only be
ended. Code and results travel in memory that launcher and worker send to each other, never through a
store.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.pools._pool import Pool as Pool, pool as pool
    from elasticlib.pools._pool_workers import PoolWorkers as PoolWorkers

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.pools._pool": "Pool pool",
        "elasticlib.pools._pool_workers": "PoolWorkers",
    },
)
