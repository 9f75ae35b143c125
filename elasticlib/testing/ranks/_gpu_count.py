"""
The number of GPUs that this machine has for the ranks of tests.

Rules of this file: the number is found once. If it cannot be found, it is 0.
"""

from __future__ import annotations

import functools

from elasticlib.errors import ElasticError
from elasticlib.testing.ranks._rank_options import RankOptions
from elasticlib.workers import workers_per_node


def missing_gpus(wanted: RankOptions, option: str = "nproc") -> str:
    """Return why a test must be skipped, "" if it can run; *option* names its number of ranks."""
    if wanted.device == "cpu" or gpus() >= wanted.nproc:
        return ""
    return f"{option}={wanted.nproc} needs one GPU for each rank, but this machine has {gpus() or 'none'}"


@functools.cache
def gpus() -> int:
    """Return the number of GPUs that workers can use; 0 if that cannot be found."""
    try:
        return workers_per_node("gpu", ("torch",), (), {})
    except (ElasticError, ValueError):
        return 0
