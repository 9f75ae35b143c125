"""Making a `SubprocessHandler` by a function, which is how torch's callers do it."""

from __future__ import annotations

from collections.abc import Sequence

from elasticlib.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from elasticlib.numa.binding import NumaOptions

__all__ = ["get_subprocess_handler"]


def get_subprocess_handler(
    entrypoint: str,
    args: Sequence[object],
    env: dict[str, str],
    stdout: str | None,
    stderr: str | None,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start a program; see `SubprocessHandler`. (torch: ``...multiprocessing.subprocess_handler``)"""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
