"""
Pickling of a call for the workers: a function that they cannot import is sent by value, and all
is checked before a start.

A script that workers can import is imported by them. Its functions and classes are sent by name,
and the worker's variables get the changes that its program has made.

Functions and classes of another ``__main__`` (a notebook's) are sent with their definitions, and
with the source lines of cells for tracebacks. The worker puts the definitions into its own
``__main__``.

Rules of this file: nothing is sent twice. The definitions come first, so that they can be read
without the call.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import logging
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import cloudpickle
from attrs import frozen

from elasticlib.errors import PicklingError
from elasticlib.workers.captures import _main_script, _shared_arguments
from elasticlib.workers.captures._call_pickler import CallPickler, Counter
from elasticlib.workers.captures._parts import CapturedCall, is_owner, parts_of, refusal
from elasticlib.workers.child import _function
from elasticlib.workers.child._buffers import Memory, sealed

_log = logging.getLogger("elasticlib")
_WORTH_A_WARNING = 100_000_000
"""Bytes of a capture from which on a warning is logged."""


@frozen
class Packed:
    """A function with its arguments, ready to be sent."""

    function: bytes
    """Pickle of (function, args, kwargs); it continues that of the definitions."""
    definitions: bytes
    """Pickles of the origin of ``__main__``, and of the definitions by name; empty without any."""
    names: frozenset[str] | None
    """Names of the definitions; None if both sides have imported all."""
    sources: dict[str, list[str]]
    """Lines of files that only exist in this process, by file name."""
    memories_apart: dict[str, Memory]
    """By name: large buffers, and storages that this program shares with the workers."""

    def memories(self) -> dict[str, bytes | Memory]:
        """Return the memories that the workers get, by name."""
        found: dict[str, bytes | Memory] = {"function": self.function}
        if self.definitions:
            found["definitions"] = self.definitions
        return found | self.memories_apart


_WITH_PARTS = (
    types.ModuleType,
    type,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    staticmethod,
    classmethod,
    property,
    _main_script.CACHED,
)
"""Types whose parts are named in a warning."""


def pack_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], main: str | None = None
) -> Packed:
    """
    Pickle a call. Raises `PicklingError` that names the part which cannot be sent.

    A function of a module that the workers could not import is sent by value, with the globals of
    its module that it uses. *main* is `LaunchConfig.main`.
    """
    sent = function, tuple(args), dict(kwargs)
    script = _main_script.importable(main)
    with _sent_by_value(_unimportable_module(function)):
        try:
            parcel = _pickled(sent, script)
        # It names the part already.
        except PicklingError:
            raise
        except Exception as error:
            raise PicklingError(_refusal_of(CapturedCall(*sent), error, script, main)) from error
        if parcel.size() >= _WORTH_A_WARNING:
            variables = {} if script is None else _main_script.overlay_contents(parcel.definitions)
            _warn_of_captures(CapturedCall(*sent), parcel.pickler, variables)

    return parcel.packed()


_Sent: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function with its arguments, in the form in which they are pickled."""


def _pickled(sent: _Sent, script: _main_script.ImportableMain | None) -> _Parcel:
    """Pickle the call *sent* behind all definitions that it needs."""
    try_to_send = _Tries()

    # First to nowhere, because the definitions must stand before the call that needs them.
    alone = CallPickler(Counter(), apart=True, main=script)
    alone.dump(sent[0])
    known = _definitions(alone, script, try_to_send)
    while True:
        parcel = _Parcel(script, known)
        parcel.fill(sent)
        needed = _definitions(parcel.pickler, script, try_to_send)
        if needed.keys() <= known.keys():
            return parcel
        # The arguments need more definitions than the function does: with another pickle, these
        # come first too.
        known = needed


def _definitions(
    pickler: CallPickler, script: _main_script.ImportableMain | None, try_to_send: _main_script.TryToSend
) -> dict[str, Any]:
    """
    Return the definitions of ``__main__`` that *pickler* has met, by name; of a *script*, only
    its changes.
    """
    if script is None:
        return pickler.definitions
    return _main_script.overlay_of(script, pickler.of_main, try_to_send)


class _Parcel:
    """
    The pickle of one call: the definitions, and then the call.

    One pickler writes both, so that they refer to the same objects. Large and shared memory is
    kept apart.
    """

    def __init__(self, script: _main_script.ImportableMain | None, definitions: dict[str, Any]) -> None:
        self._script = script
        self.definitions = definitions
        self._buffer = io.BytesIO()
        self.pickler = CallPickler(self._buffer, apart=True, main=script)
        self._of_definitions = 0, 0, 0
        """Bytes, large buffers and shared memories that belong to the definitions."""

    def fill(self, sent: _Sent) -> None:
        """Pickle the definitions, and then the call *sent*."""
        script, pickler = self._script, self.pickler
        # First of all: the caller's tracker, not the worker's own, must know of shared memory.
        pickler.dump(_shared_arguments.family(pickler.shared))
        if self.definitions or script is not None:
            pickler.dump(None if script is None else script.origin)
            pickler.dump(self.definitions)
            self._of_definitions = self._buffer.tell(), len(pickler.large), len(pickler.shared)
        pickler.dump(sent)

    def size(self) -> int:
        """Return the bytes that are copied for each worker."""
        return self._buffer.tell() + sum(part.raw().nbytes for part in self.pickler.large)

    def packed(self) -> Packed:
        """Return the pickle in its two parts."""
        pickler, pickled = self.pickler, self._buffer.getbuffer()
        length, large, shared = self._of_definitions
        apart = _apart(pickler.large[:large], pickler.shared[:shared], _function.OF_DEFINITIONS)
        apart |= _apart(pickler.large[large:], pickler.shared[shared:], "")
        names = None if self._script is not None else frozenset(self.definitions)
        return Packed(bytes(pickled[length:]), bytes(pickled[:length]), names, _sources(pickler.files), apart)


def _refusal_of(
    call: CapturedCall, error: Exception, script: _main_script.ImportableMain | None, main: str | None
) -> str:
    """
    Return the message that names the part of *call* which cannot be sent; *error* does not name
    it.
    """
    fresh = CallPickler(io.BytesIO(), apart=True, main=script)
    with _shared_arguments.spawning([]):
        dump = functools.partial(_dump, main=script)
        is_of_script = script is None and main is None and _main_script.has_script()
        return refusal(call, error, fresh, dump, is_of_script=is_of_script)


class _Tries:
    """Raises the reason why a value cannot be sent; each value of one call is tried once."""

    def __init__(self) -> None:
        self._good: dict[int, Any] = {}
        """The values that can be sent, by their ids."""

    def __call__(self, value: Any, script: _main_script.ImportableMain) -> None:
        if id(value) not in self._good:
            CallPickler(Counter(), apart=True, main=script).dump(value)
            # Kept, so that no other value gets its id.
            self._good[id(value)] = value


def _apart(large: Sequence[pickle.PickleBuffer], shared: Sequence[Memory], of: str) -> dict[str, Memory]:
    found = {of + _function.BUFFERS: sealed([part.raw() for part in large])} if large else {}
    return found | {f"{of}{_function.SHARED}{number:08}": each for number, each in enumerate(shared)}


_registry_lock = threading.Lock()
_registered: list[types.ModuleType] = []
"""The module that is registered for the current pickle."""


def _renew_registry() -> None:
    """
    Reset the registry in a process that was forked while another thread pickled: only the parent
    continues that.
    """
    global _registry_lock
    _registry_lock = threading.Lock()
    while _registered:
        cloudpickle.unregister_pickle_by_value(_registered.pop())


os.register_at_fork(after_in_child=_renew_registry)


@contextmanager
def _sent_by_value(module: types.ModuleType | None) -> Iterator[None]:
    """
    Make cloudpickle send *module*'s functions by value in the block, unless the user has already
    done so.
    """
    if module is None:
        yield
        return

    # cloudpickle has one registry for all threads of the program.
    with _registry_lock:
        if module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return

        try:
            cloudpickle.register_pickle_by_value(module)
            _registered.append(module)
            yield
        finally:
            _registered.clear()
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)


def _dump(value: Any, main: _main_script.ImportableMain | None = None) -> bytes:
    buffer = io.BytesIO()
    CallPickler(buffer, main=main).dump(value)
    return buffer.getvalue()


def _unimportable_module(function: Callable[..., Any]) -> types.ModuleType | None:
    """
    Return the module of *function* if a worker, with this ``sys.path`` and its import hooks,
    would not find it.
    """
    name = getattr(function, "__module__", None) or "builtins"
    module = sys.modules.get(name)
    # cloudpickle sends functions of ``__main__`` by value anyway.
    if module is None or name == "__main__":
        return None
    top = name.partition(".")[0]
    if any(finder.find_spec(top, None) is not None for finder in sys.meta_path):
        return None
    return module


def _sources(files: set[str]) -> dict[str, list[str]]:
    lines = {}
    for name in files:
        entry = linecache.cache.get(name)
        # Workers read files themselves; an entry that is not loaded yet has no lines.
        if entry is not None and len(entry) == 4 and not os.path.exists(name):
            lines[name] = list(entry[2])
    return lines


class _Scales(CallPickler):
    """
    Weighs a value without the captures of functions and classes, which have names of their own.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        is_by_value = isinstance(obj, (type, types.FunctionType)) and isinstance(reduced, tuple)
        return (str, ()) if is_by_value else reduced


def _weight(value: object) -> int:
    """Return the bytes that are copied for *value*; 0 if it cannot be sent alone."""
    counter = Counter()
    scales = _Scales(counter, apart=True)
    with contextlib.suppress(Exception):
        scales.dump(value)
        return counter.bytes + sum(part.raw().nbytes for part in scales.large)
    return 0


_warned: set[str] = set()
"""Parts that this program has been warned of."""


def _warn_of_captures(call: CapturedCall, pickler: CallPickler, variables: Mapping[str, Any]) -> None:
    """
    Warn of large captures of the function of *call*: few users know that they are sent with each
    call.

    *variables*: those of a script that workers import.
    """
    owners = [each for each in (call.function, *pickler.by_value) if is_owner(each)]
    taken_along = (part for owner in owners for part in parts_of(owner, pickler.reducer_override))
    parts = {part.name: part.value for part in (*call.attributes(), *taken_along)}
    parts |= {f"global variable {name!r}": value for name, value in variables.items()}
    for part, value in parts.items():
        if not isinstance(value, _WITH_PARTS):
            _warn_if_large(part, value)


def _warn_if_large(part: str, value: object) -> None:
    """Warn once in this program of a large *part*."""
    if part in _warned:
        return

    size = _weight(value)
    if size < _WORTH_A_WARNING:
        return

    _warned.add(part)
    _log.warning(
        "%s, a %s, has %.0f MB and is sent to the workers at every call: create it in the function, or, "
        "for a pool, in a module, which each worker imports once",
        part,
        type(value).__qualname__,
        size / 1e6,
    )
