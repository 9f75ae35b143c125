"""
How many threads a worker computes with, although its libraries were loaded before it was born.

torch and the BLAS libraries read OMP_NUM_THREADS and its kin once, at import. A worker forked from the
fork server gets the number through their setters; a variable that the user's code sets too late for
anything else is answered with a warning that names it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from typing import Any

from elasticlib.workers.child import _held

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# What is read when the module named on the right is imported, and never again.
_READ_AT_IMPORT = (
    (re.compile(r"(OMP|GOMP|KMP|MKL|OPENBLAS)_"), "torch"),
    (re.compile(r"TORCH_(LOGS|LOGS_FORMAT|LOGS_OUT|TRACE|DISTRIBUTED_DEBUG|SHOW_CPP_STACKTRACES)$"), "torch"),
    (re.compile(r"PYTORCH_JIT"), "torch"),
    (re.compile(r"TORCHDYNAMO_"), "torch._dynamo"),
    (re.compile(r"TORCHINDUCTOR_"), "torch._inductor.config"),
)


@functools.cache
def blas_libraries() -> list[Any]:
    """
    The OpenBLAS libraries of this process, each as (getter, setter) of its thread count.

    The answer is kept, for the workers too: first asked for when the fork server has done its imports.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line}
    found = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                getter = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if getter is not None and setter is not None:
                    found.append((getter, setter))
    return found


def apply(count: int) -> None:
    """Have the libraries that are loaded compute with *count* threads, but no more than CPUs, as at their import."""
    count = min(count, len(os.sched_getaffinity(0)))
    torch = _held.module("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
    if _held.loaded("numpy"):
        for getter, setter in blas_libraries():
            if getter() != count:
                setter(count)


def watch_environment() -> None:
    """Notice variables that are set after the libraries which read them were loaded."""
    plain = os.putenv
    warned: set[str] = set()
    # A module that the worker itself imports will read the new value.
    came_loaded = {module for _, module in _READ_AT_IMPORT if _held.loaded(module)}

    def putenv(name: str | bytes, value: str | bytes) -> None:
        plain(name, value)
        key = os.fsdecode(name)
        if key in _THREAD_VARIABLES and os.fsdecode(value).isdecimal() and int(value) > 0:
            apply(int(value))
            return
        for pattern, module in _READ_AT_IMPORT:
            if pattern.match(key) and module in came_loaded and key not in warned and _set_by_main():
                warned.add(key)
                print(
                    f"elasticlib: {key} was set after {module} had read it: it has no effect here; "
                    "set it before the launch, or launch with --preload '' (preload=())",
                    file=sys.stderr,
                )

    # os.environ's __setitem__ calls the module's putenv by its global name.
    def _set_by_main() -> bool:
        """Whether the user's own program set it; libraries set defaults that nobody asked for."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in (
            "os",
            "collections.abc",
            "_collections_abc",
        ):
            frame = frame.f_back
        return frame.f_globals.get("__name__") == "__main__"

    os.putenv = putenv  # type: ignore[assignment]
