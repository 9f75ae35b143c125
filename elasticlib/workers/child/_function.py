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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elasticlib.processes import close_each, content_of_memory, names_of_parts
from elasticlib.stacks import CALLERS
from elasticlib.workers.child import _buffers
from elasticlib.workers.child.program import _main, _shared_handles

DEFINITIONS_VARIABLE = "ELASTICLIB_MAIN"
"""Where processes that a worker spawns find the classes and functions of the caller's ``__main__``."""
_SPAWN_DEFINITIONS = "elasticlib.workers.child.program._main_definitions"
BUFFERS = "buffers"
"""The memory with what is large."""
SHARED = "shared "
"""Begins the names of storages that the caller's program shares, which end with their number in eight digits."""
OF_DEFINITIONS = "main "
"""Begins the names of such memories where the definitions speak of them: what is spawned later needs them, too."""
_offered: Sequence[int] = ()
"""The descriptors of the files with the definitions."""
_said: set[str] = set()
"""The warnings that this worker has written."""
_kept: Mapping[str, int] = {}
"""Descriptors of memories that those speak of, by name."""


def unpacked(
    content: bytes, sources: Mapping[str, Sequence[str]], memories: Mapping[str, int]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """
    The function of *content*, its arguments and keyword arguments; ``__main__`` has its definitions.

    What is large lies in *memories*, whose descriptors are closed, or kept for processes that multiprocessing spawns.
    """
    # So that tracebacks show the lines of code that is in no file.
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    own = {name: each for name, each in memories.items() if name.startswith((BUFFERS, SHARED))}
    definitions = [memories[name] for name in names_of_parts("definitions", memories)]
    try:
        before = b""
        if definitions:
            before = content_of_memory("definitions", memories)
            _keep({name: each for name, each in memories.items() if name.startswith(OF_DEFINITIONS)})
        with _reading(before + content, memories) as pickles:
            _shared_handles.join(pickles.load())
            if definitions:
                _offer(definitions, is_needed=_defined(pickles, definitions))
            function, args, kwargs = pickles.load()
    finally:
        close_each(own.values())
    return function, args, kwargs


def _defined(pickles: pickle.Unpickler, descriptors: Sequence[int]) -> bool:
    """As `_define`; where that fails, the *descriptors* of the definitions are closed."""
    try:
        return _define(pickles)
    except BaseException:
        close_each(descriptors)
        raise


def _define(pickles: pickle.Unpickler) -> bool:
    """Have in ``__main__`` what the launcher sends of its own; whether the script's import lacks some of it."""
    origin = pickles.load()
    if origin is None:
        _main.leave()
        definitions = pickles.load()
        sys.modules["__main__"].__dict__.update(definitions)
        return True
    _main.become(origin)
    changed = pickles.load()
    _say(_main.lay_over(_main.namespace(), changed))
    return bool(changed)


def _say(warnings: Sequence[str]) -> None:
    """Write *warnings* to stderr, each once, and once for all workers of a node."""
    for text in warnings:
        if os.environ.get("LOCAL_RANK", "0") == "0" and text not in _said:
            _said.add(text)
            print(f"elasticlib: {text}", file=sys.stderr)


@contextlib.contextmanager
def _reading(content: bytes, memories: Mapping[str, int]) -> Iterator[pickle.Unpickler]:
    """The pickles in *content*, one behind the other; they speak of *memories*: of those of the definitions first."""
    parts: list[memoryview] = []
    shared: list[int] = []
    for of in (OF_DEFINITIONS, ""):
        if of + BUFFERS in memories:
            parts += _buffers.mapped(memories[of + BUFFERS])
        shared += [memories[name] for name in sorted(memories) if name.startswith(of + SHARED)]
    _buffers.shared = shared
    try:
        yield pickle.Unpickler(io.BytesIO(content), buffers=parts)
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


def _offer(descriptors: Sequence[int], *, is_needed: bool) -> None:
    """
    Have processes that multiprocessing spawns from here import what is in these files as their ``__main__``.

    What is large of it lies in the memories that were kept. Where it is not *needed*, they import the script alone.
    """
    global _offered
    former, _offered = _offered, descriptors
    close_each(former)
    if is_needed:
        _tell()
        sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec(_SPAWN_DEFINITIONS, None)
    else:
        _main.restore_spec()


def _keep(memories: Mapping[str, int]) -> None:
    """Have the definitions speak of *memories*, and no longer of those of the call before."""
    global _kept
    former, _kept = _kept, memories
    _tell()
    close_each(former.values())


def _tell() -> None:
    if _offered:
        large = _kept.get(OF_DEFINITIONS + BUFFERS, "")
        shared = [each for name, each in sorted(_kept.items()) if name.startswith(OF_DEFINITIONS + SHARED)]
        files = f"/proc/{os.getpid()}/fd/{','.join(map(str, _offered))}"
        os.environ[DEFINITIONS_VARIABLE] = ":".join(map(str, (files, large, *shared)))


def define_offered(variables: dict[str, Any]) -> None:
    """Have *variables*, this process' ``__main__``, hold what the worker offers which has spawned it."""
    files, large, *shared = os.environ[DEFINITIONS_VARIABLE].split(":")
    folder, numbers = os.path.split(files)
    with contextlib.ExitStack() as stack:
        content = b"".join(stack.enter_context(open(f"{folder}/{each}", "rb")).read() for each in numbers.split(","))
        memories = {}
        if large:
            memories[OF_DEFINITIONS + BUFFERS] = stack.enter_context(open(f"{folder}/{large}", "rb")).fileno()
        for number, each in enumerate(shared):
            file = stack.enter_context(_opened(f"{folder}/{each}"))
            memories[f"{OF_DEFINITIONS}{SHARED}{number:08}"] = file.fileno()
        with _reading(content, memories) as pickles:
            # The first pickle is the family: multiprocessing itself joins the processes that it
            # spawns.
            pickles.load()
            origin = pickles.load()
            if origin is not None:
                # The variables are those of this module.
                sys.modules["__main__"] = sys.modules["__mp_main__"]
                _main.run_in(variables, origin)
                _main.lay_over(variables, pickles.load())
            else:
                variables.update(pickles.load())


def _opened(path: str) -> io.FileIO:
    """The file or pipe at *path*; nothing can be opened of a socket, which this process does without."""
    try:
        return io.FileIO(path, "r+")
    except OSError:
        return io.FileIO(os.devnull, "r+")


CALLERS.update((__file__, _main.__file__))
