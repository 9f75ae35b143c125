"""
Unpacking of a function that the launcher pickled, with the definitions that it needs of the
caller's ``__main__``.

Rules of this file: it unpickles only memory that the launcher itself has sent.
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
"""
Variable with the place of the definitions of the caller's ``__main__``, for processes that a
worker spawns.
"""
_SPAWN_DEFINITIONS = "elasticlib.workers.child.program._main_definitions"
BUFFERS = "buffers"
"""Name of the memory with the large buffers."""
SHARED = "shared "
"""
Start of the names of storages that the caller's program shares; their number in eight digits
follows.
"""
OF_DEFINITIONS = "main "
"""
Prefix of such memories that the definitions use: processes that are spawned later need them too.
"""
_offered: Sequence[int] = ()
"""Descriptors of the files with the definitions."""
_warned: set[str] = set()
"""Warnings that this worker has written."""
_kept: Mapping[str, int] = {}
"""Descriptors of the memories that the definitions use, by name."""


def no_ipython() -> Any:
    """Take the place of a notebook's ``get_ipython`` in a worker, where no shell of IPython runs."""
    raise NameError(
        "name 'get_ipython' is not defined in a worker: run commands by subprocess.run() instead of !command, "
        "and call functions instead of %magics"
    )


def no_ipython_here() -> Callable[[], Any]:
    """Return `no_ipython`."""
    return no_ipython


def unpacked(
    content: bytes, sources: Mapping[str, Sequence[str]], memories: Mapping[str, int]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """
    Return the function of *content*, its arguments and keyword arguments; ``__main__`` gets its
    definitions.

    Large buffers are in *memories*. Their descriptors are closed, or kept for processes that
    multiprocessing spawns.
    """
    # So that tracebacks show the lines of code that is not in a file.
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
    """Do as `_define`; if that fails, close the *descriptors* of the definitions."""
    try:
        return _define(pickles)
    except BaseException:
        close_each(descriptors)
        raise


def _define(pickles: pickle.Unpickler) -> bool:
    """
    Put the launcher's own definitions into ``__main__``.

    Return True if the script's import lacks some of them.
    """
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
        if os.environ.get("LOCAL_RANK", "0") == "0" and text not in _warned:
            _warned.add(text)
            print(f"elasticlib: {text}", file=sys.stderr)


@contextlib.contextmanager
def _reading(content: bytes, memories: Mapping[str, int]) -> Iterator[pickle.Unpickler]:
    """
    Yield an unpickler of the consecutive pickles in *content*.

    They refer to *memories*: first to those of the definitions.
    """
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
    """
    Return a function with ``functools.lru_cache``, whose own function `wrap` sets later.

    That function may call itself by this one.
    """

    @functools.lru_cache(maxsize, typed)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call.__wrapped__(*args, **kwargs)

    return call


def wrap(call: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
    """Make *wrapped* the function that *call*, from `cached`, runs."""
    functools.update_wrapper(call, wrapped)


def _offer(descriptors: Sequence[int], *, is_needed: bool) -> None:
    """
    Offer these files to processes that multiprocessing spawns from here, as their ``__main__``.

    Its large buffers are in the kept memories. If it is not *needed*, these processes import the
    script alone.
    """
    global _offered
    former, _offered = _offered, descriptors
    close_each(former)
    if is_needed:
        _set_variable()
        sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec(_SPAWN_DEFINITIONS, None)
    else:
        _main.restore_spec()


def _keep(memories: Mapping[str, int]) -> None:
    """Keep *memories* for the definitions, and close those of the call before."""
    global _kept
    # The variable must not name memories that are closed already.
    former, _kept = _kept, memories
    _set_variable()
    close_each(former.values())


def _set_variable() -> None:
    if _offered:
        large = _kept.get(OF_DEFINITIONS + BUFFERS, "")
        shared = [each for name, each in sorted(_kept.items()) if name.startswith(OF_DEFINITIONS + SHARED)]
        files = f"/proc/{os.getpid()}/fd/{','.join(map(str, _offered))}"
        os.environ[DEFINITIONS_VARIABLE] = ":".join(map(str, (files, large, *shared)))


def define_offered(variables: dict[str, Any]) -> None:
    """
    Fill *variables*, the ``__main__`` of this process, with the definitions of the worker that
    spawned it.
    """
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
                # The variables belong to this module.
                sys.modules["__main__"] = sys.modules["__mp_main__"]
                _main.run_in(variables, origin)
                _main.lay_over(variables, pickles.load())
            else:
                variables.update(pickles.load())


def _opened(path: str) -> io.FileIO:
    """Open the file or pipe at *path*; ``/dev/null`` for a socket, which cannot be opened."""
    try:
        return io.FileIO(path, "r+")
    except OSError:
        return io.FileIO(os.devnull, "r+")


CALLERS.update((__file__, _main.__file__))
