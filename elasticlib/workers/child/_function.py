"""
How a function that its launcher packed becomes one of this process, with what it needs of the caller's ``__main__``.

Rules of this file: only what the launcher handed over itself, in memory, is unpickled.
"""

from __future__ import annotations

import functools
import importlib.machinery
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from elasticlib.workers.child import _buffers

DEFINITIONS_VARIABLE = "ELASTICLIB_MAIN"
"""Where processes that a worker spawns find the classes and functions of the caller's ``__main__``."""
_SPAWN_DEFINITIONS = "elasticlib.workers.child._main_definitions"
BUFFERS = "buffers"
"""The memory with what is large."""
SHARED = "shared "
"""Begins the names of storages that the caller's program shares, which end with their number in eight digits."""
OWN_FILES: set[str] = set()
"""Whose frames say nothing to the user."""


def unpacked(
    content: bytes, sources: Mapping[str, Sequence[str]], memories: Mapping[str, int]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """
    The function of *content*, its arguments and keyword arguments; ``__main__`` has its definitions.

    What is large lies in *memories*, whose descriptors for that are closed.
    """
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    own = [memories[name] for name in sorted(memories) if name.startswith((BUFFERS, SHARED))]
    _buffers.shared = [memories[name] for name in sorted(memories) if name.startswith(SHARED)]
    parts = _buffers.mapped(memories[BUFFERS]) if BUFFERS in memories else []
    try:
        unpickler = pickle.Unpickler(io.BytesIO(content), buffers=parts)
        (function, args, kwargs), definitions = unpickler.load(), unpickler.load()
    finally:
        _buffers.shared = ()
        for descriptor in own:
            os.close(descriptor)
    sys.modules["__main__"].__dict__.update(definitions)
    return function, args, kwargs


def cached(maxsize: int | None, typed: bool) -> Callable[..., Any]:
    """What ``functools.lru_cache`` makes of a function that `wrap` gives it later: that may call itself by this."""

    @functools.lru_cache(maxsize, typed)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call.__wrapped__(*args, **kwargs)

    return call


def wrap(call: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
    """Have the *call* of `cached` be that of *wrapped*."""
    functools.update_wrapper(call, wrapped)


def offer_definitions(descriptor: int) -> None:
    """Have processes that multiprocessing spawns from here import what is in that memory as their ``__main__``."""
    os.environ[DEFINITIONS_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec(_SPAWN_DEFINITIONS, None)


def user_part(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in OWN_FILES:
        frames = frames.tb_next
    return frames


OWN_FILES.add(__file__)
