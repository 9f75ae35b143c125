"""
How a function that its launcher packed becomes one of this process, with what it needs of the caller's ``__main__``.

Rules of this file: only what the launcher handed over itself, in memory, is unpickled.
"""

from __future__ import annotations

import importlib.machinery
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

DEFINITIONS_VARIABLE = "ELASTICLIB_MAIN"
"""Where processes that a worker spawns find the classes and functions of the caller's ``__main__``."""
_SPAWN_DEFINITIONS = "elasticlib.workers.child._main_definitions"
OWN_FILES: set[str] = set()
"""Whose frames say nothing to the user."""


def unpacked(
    content: bytes, sources: Mapping[str, Sequence[str]]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """The function of *content*, its arguments and keyword arguments; ``__main__`` has its definitions."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    unpickler = pickle.Unpickler(io.BytesIO(content))
    (function, args, kwargs), definitions = unpickler.load(), unpickler.load()
    sys.modules["__main__"].__dict__.update(definitions)
    return function, args, kwargs


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
