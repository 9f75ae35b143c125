"""
How a function that its launcher packed becomes one of this process, with what it needs of the caller's ``__main__``.

Rules of this file: only what the launcher handed over itself, in memory, is unpickled.
"""

from __future__ import annotations

import contextlib
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

from elasticlib import _large_files
from elasticlib.workers.child import _buffers

DEFINITIONS_VARIABLE = "ELASTICLIB_MAIN"
"""Where processes that a worker spawns find the classes and functions of the caller's ``__main__``."""
_SPAWN_DEFINITIONS = "elasticlib.workers.child._main_definitions"
BUFFERS = "buffers"
"""The memory with what is large."""
SHARED = "shared "
"""Begins the names of storages that the caller's program shares, which end with their number in eight digits."""
OF_DEFINITIONS = "main "
"""Begins the names of such memories where the definitions speak of them: what is spawned later needs them, too."""
OWN_FILES: set[str] = set()
"""Whose frames say nothing to the user."""
_offered: Sequence[int] = ()
"""The descriptors of the files with the definitions."""
_kept: Mapping[str, int] = {}
"""Descriptors of memories that those speak of, by name."""


def unpacked(
    content: bytes, sources: Mapping[str, Sequence[str]], memories: Mapping[str, int]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """
    The function of *content*, its arguments and keyword arguments; ``__main__`` has its definitions.

    What is large lies in *memories*, whose descriptors for that are closed, or kept for `offer_definitions`.
    """
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    own = {name: each for name, each in memories.items() if name.startswith((BUFFERS, SHARED))}
    try:
        before = b""
        if "definitions" in memories:
            before = _large_files.content_named("definitions", memories)
            _keep({name: each for name, each in memories.items() if name.startswith(OF_DEFINITIONS)})
        *definitions, (function, args, kwargs) = _loaded(before + content, 1 + bool(before), memories)
    finally:
        for descriptor in own.values():
            os.close(descriptor)
    for each in definitions:
        sys.modules["__main__"].__dict__.update(each)
    return function, args, kwargs


def _loaded(content: bytes, count: int, memories: Mapping[str, int]) -> list[Any]:
    """The first *count* objects of *content*, which speaks of *memories*: of those of the definitions first."""
    parts: list[memoryview] = []
    shared: list[int] = []
    for of in (OF_DEFINITIONS, ""):
        if of + BUFFERS in memories:
            parts += _buffers.mapped(memories[of + BUFFERS])
        shared += [memories[name] for name in sorted(memories) if name.startswith(of + SHARED)]
    _buffers.shared = shared
    try:
        unpickler = pickle.Unpickler(io.BytesIO(content), buffers=parts)
        return [unpickler.load() for _ in range(count)]
    finally:
        _buffers.shared = ()


def cached(maxsize: int | None, typed: bool) -> Callable[..., Any]:
    """What ``functools.lru_cache`` makes of a function that `wrap` gives it later: that may call itself by this."""

    @functools.lru_cache(maxsize, typed)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call.__wrapped__(*args, **kwargs)

    return call


def wrap(call: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
    """Have the *call* of `cached` be that of *wrapped*."""
    functools.update_wrapper(call, wrapped)


def offer_definitions(descriptors: Sequence[int]) -> None:
    """
    Have processes that multiprocessing spawns from here import what is in these files as their ``__main__``.

    What is large of it lies in the memories that `unpacked` has kept.
    """
    global _offered
    _offered = descriptors
    _tell()
    sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec(_SPAWN_DEFINITIONS, None)


def _keep(memories: Mapping[str, int]) -> None:
    """Have the definitions speak of *memories*, and no longer of those of the call before."""
    global _kept
    former, _kept = _kept, memories
    _tell()
    for descriptor in former.values():
        os.close(descriptor)


def _tell() -> None:
    if _offered:
        large = _kept.get(OF_DEFINITIONS + BUFFERS, "")
        shared = [each for name, each in sorted(_kept.items()) if name.startswith(OF_DEFINITIONS + SHARED)]
        files = f"/proc/{os.getpid()}/fd/{','.join(map(str, _offered))}"
        os.environ[DEFINITIONS_VARIABLE] = ":".join(map(str, (files, large, *shared)))


def offered() -> dict[str, Any]:
    """The definitions that the worker offers which has spawned this process."""
    files, large, *shared = os.environ[DEFINITIONS_VARIABLE].split(":")
    folder, numbers = os.path.split(files)
    with contextlib.ExitStack() as stack:
        content = b"".join(stack.enter_context(open(f"{folder}/{each}", "rb")).read() for each in numbers.split(","))
        memories = {}
        if large:
            memories[OF_DEFINITIONS + BUFFERS] = stack.enter_context(open(f"{folder}/{large}", "rb")).fileno()
        for number, each in enumerate(shared):
            file = stack.enter_context(open(f"{folder}/{each}", "r+b", buffering=0))
            memories[f"{OF_DEFINITIONS}{SHARED}{number:08}"] = file.fileno()
        (definitions,) = _loaded(content, 1, memories)
    return dict(definitions)


def user_part(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in OWN_FILES:
        frames = frames.tb_next
    return frames


OWN_FILES.add(__file__)
