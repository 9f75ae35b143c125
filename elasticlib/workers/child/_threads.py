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

    The result is kept, for the workers too: it is first computed when the fork server has done
    its imports.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
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


def set_blas_threads(count: int) -> None:
    """
    Set the loaded libraries to *count* threads, but at most the number of CPUs, as at their
    import.
    """
    count = min(count, len(os.sched_getaffinity(0)))
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
    if "numpy" in sys.modules:
        for getter, setter in blas_libraries():
            if getter() != count:
                setter(count)
