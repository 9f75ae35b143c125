"""
Sending of multiprocessing's shared objects with a call: by its own rules, with descriptors among
the call's memories.

Rules of this file: a descriptor is sent as a descriptor, or its owner is refused. The number of a
descriptor is never sent.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing.context
import multiprocessing.process
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

from elasticlib.workers.child._buffers import Memory
from elasticlib.workers.child.program import _shared_handles

_PLAIN = (types.MethodType, functools.partial, type(list.append), type(int.__add__))
"""Kinds that multiprocessing has reducers for, but any pickler can send."""
_COPIED = (io.IOBase, tempfile.SpooledTemporaryFile)
"""Kinds that may have a descriptor, and are sent as their content or refused by other rules."""


class _Spawning:
    """
    Stand-in for the process that multiprocessing's objects are sent to, while they are pickled.
    """

    DupFd = _shared_handles.SharedDescriptor

    def __init__(self, shared: list[Memory]) -> None:
        self._shared = shared

    def duplicate_for_child(self, descriptor: int) -> int:
        """Return the number of a copy of *descriptor* among the memories of the call."""
        self._shared.append(Memory(os.dup, descriptor))
        return len(self._shared) - 1


@contextlib.contextmanager
def spawning(shared: list[Memory]) -> Iterator[None]:
    """
    Pickle multiprocessing's objects in the block as for a spawned process.

    *shared* gets their descriptors.
    """
    context: Any = multiprocessing.context
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning(shared))
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def reduced(obj: Any) -> Any:
    """
    Reduce *obj* by multiprocessing's rules, or to its name in torch; NotImplemented for all other
    objects.
    """
    if _is_for_forked_processes(obj):
        raise TypeError(
            "it belongs to multiprocessing's fork context, so only forked processes can use it: create it with "
            "multiprocessing.get_context('spawn')"
        )

    reduction: Any = sys.modules.get("multiprocessing.reduction")
    kind = type(obj)
    reducer = None if reduction is None else reduction.ForkingPickler._extra_reducers.get(kind)

    # torch has reducers of its own there, for tensors, which are sent in another way.
    if reducer is not None and kind not in _PLAIN and reducer.__module__.startswith("multiprocessing."):
        make, *parts = reducer(obj)
        # multiprocessing's own way leaves the descriptor open for the worker's whole life.
        return (_shared_handles.arena if make.__name__ == "rebuild_arena" else make, *parts)

    name_in_torch = _NAMES_IN_TORCH.get((kind.__module__, kind.__name__))
    if name_in_torch is not None:
        return _shared_handles.of_torch, (name_in_torch(obj),)

    if _takes_numbers_along(obj):
        raise TypeError(
            "it holds file descriptors, and in a worker the same numbers belong to other files: send a "
            "connection, a socket, or the path of the file"
        )

    return NotImplemented


def _is_for_forked_processes(obj: Any) -> bool:
    """
    Return True for a lock without a name.

    Python 3.10 would send its address, which belongs to another object there.
    """
    synchronize: Any = sys.modules.get("multiprocessing.synchronize")
    return synchronize is not None and isinstance(obj, synchronize.SemLock) and obj._semlock.name is None


def _takes_numbers_along(obj: Any) -> bool:
    """
    Return True if *obj* would be sent with the numbers of its descriptors, which are wrong in a
    worker.
    """
    if _is_selector(obj):
        return True
    kind = type(obj)
    if not hasattr(kind, "fileno"):
        return False
    if isinstance(obj, (*_COPIED, type)) or _says_how_it_travels(kind):
        return False
    return _has_descriptor(obj)


def _has_descriptor(obj: Any) -> bool:
    try:
        number = obj.fileno()
    except Exception:  # it is closed, or has none
        return False
    return isinstance(number, int) and number >= 0


def _is_selector(obj: Any) -> bool:
    selectors: Any = sys.modules.get("selectors")
    return selectors is not None and isinstance(obj, selectors.BaseSelector)


def _says_how_it_travels(kind: type) -> bool:
    """Return True if *kind* has a rule of its own for pickling."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)


def family(shared: list[Memory]) -> _shared_handles.Family:
    """
    Return the state that workers inherit from this process, like those of multiprocessing.

    *shared* gets the tracker's descriptor.
    """
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    descriptor = None if module is None else module._resource_tracker._fd
    tracker = None
    if descriptor is not None:
        # It fails if the program has closed the descriptor.
        with contextlib.suppress(OSError):
            tracker = _shared_handles.SharedDescriptor(_Spawning(shared).duplicate_for_child(descriptor))
    return _shared_handles.Family(bytes(multiprocessing.process.current_process().authkey), tracker)


# torch's operators and classes.

_NAMES_IN_TORCH: dict[tuple[str, str], Callable[[Any], str]] = {
    ("torch._ops", "_Ops"): lambda _: "ops",
    ("torch._ops", "_OpNamespace"): lambda space: f"ops.{space.name}",
    ("torch._ops", "OpOverloadPacket"): lambda packet: f"ops.{packet._qualified_op_name.replace('::', '.')}",
    ("torch._ops", "OpOverload"): lambda overload: (
        f"ops.{overload._schema.name.replace('::', '.')}.{overload._overloadname}"
    ),
    ("torch._classes", "_Classes"): lambda _: "classes",
    ("torch._classes", "_ClassNamespace"): lambda space: f"classes.{space.name}",
}
"""Functions that return an object's name in torch, by module and name of its class."""
