"""Faster imports for a process that forks others, in memory pages that these can share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """
    Import in the block without garbage collection.

    Imports make little garbage, and the search for it takes a quarter of their time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """
    Import in the block for processes that are forked later: they share its pages until one
    collects garbage there.
    """
    with without_garbage_collection():
        yield
        # A collection writes into each object that it searches, and leaves out frozen ones.
        gc.freeze()
