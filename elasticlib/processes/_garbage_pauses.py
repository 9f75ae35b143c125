"""
Imports of a process from which others are forked: fast, and in pages that these share with it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import in the block: imports make little garbage, and the search for it takes a quarter of their time."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """Import in the block what processes share that are forked later, as long as none searches it for garbage."""
    with without_garbage_collection():
        yield
        gc.freeze()
