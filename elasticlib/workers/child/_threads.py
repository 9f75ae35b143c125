"""
The number of threads that a worker computes with, although its libraries were loaded before it
was forked.

torch and the BLAS libraries read OMP_NUM_THREADS and its kin once, at import. A worker forked
from the fork server gets the number through their setters. The launch sets it, or the script's
text before anything else.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
from typing import Any

# Builds of OpenBLAS differ in the names of their functions; those of numpy's wheels begin with
# scipy.
_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


@functools.cache
def blas_libraries() -> list[Any]:
    """
    Return the OpenBLAS libraries of this process, each as (getter, setter) of its thread count.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        # The sixth field of a line is the path, which may contain blanks.
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line}
    found = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix, suffix in itertools.product(_PREFIXES, _SUFFIXES):
            getter = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
            setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
            if getter is not None and setter is not None:
                found.append((getter, setter))

    return found


def note_blas_libraries() -> None:
    """Find the libraries that the imports up to now have loaded, for this process and its forks."""
    blas_libraries.cache_clear()
    blas_libraries()


def set_blas_threads(count: int) -> None:
    """
    Set the loaded libraries to *count* threads, but at most the number of CPUs, as at their
    import.
    """
    set_torch_threads(count)
    if "numpy" in sys.modules:
        count = _at_most_cpus(count)
        for getter, setter in blas_libraries():
            if getter() != count:
                setter(count)


def set_torch_threads(count: int) -> None:
    """
    Set torch, if it is loaded, to *count* threads, but at most the number of CPUs.

    The first call in a process takes 1 ms, and starts no thread. The spawner makes it for all of
    its workers.
    """
    torch: Any = sys.modules.get("torch")
    count = _at_most_cpus(count)
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _at_most_cpus(count: int) -> int:
    return min(count, len(os.sched_getaffinity(0)))
