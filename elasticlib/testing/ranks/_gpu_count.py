"""
The number of GPUs that this machine has for the ranks of tests.

Rules of this file: the number is found once. If it cannot be found, it is 0.
"""

from __future__ import annotations

import functools

from elasticlib.errors import ElasticError
from elasticlib.workers import workers_per_node


@functools.cache
def gpus() -> int:
    """Return the number of GPUs that workers can use; 0 if that cannot be found."""
    try:
        return workers_per_node("gpu", ("torch",), (), {})
    except (ElasticError, ValueError):
        return 0
