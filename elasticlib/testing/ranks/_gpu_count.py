"""
The number of GPUs that this machine has for the ranks of tests.

Rules of this file: the number is found once. If it cannot be found, it is 0.
"""

from __future__ import annotations

import functools

from elasticlib.errors import ElasticError
from elasticlib.workers import workers_per_node


def missing_gpus(given: str, nproc: int) -> str:
    """Return why a test with *nproc* GPU ranks, as *given* by an option, must be skipped; "" if it runs."""
    present = gpus()
    return "" if present >= nproc else f"{given} needs one GPU for each rank, but this machine has {present or 'none'}"


@functools.cache
def gpus() -> int:
    """Return the number of GPUs that workers can use; 0 if that cannot be found."""
    try:
        return workers_per_node("gpu", ("torch",), (), {})
    except (ElasticError, ValueError):
        return 0
