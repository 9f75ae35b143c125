"""
The pickler of a call: functions and classes by value or by name, tensors and multiprocessing's
objects as shared memory.

Rules of this file: nothing is sent twice. Definitions of a `__main__` that workers import are
sent by their names there, and its other functions share the variables of the import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from elasticlib.workers.captures import _shared_arguments
from elasticlib.workers.captures._main_script import CACHED, ImportableMain
from elasticlib.workers.child import _buffers, _by_value, _function
from elasticlib.workers.child._buffers import Memory, can_be_apart
from elasticlib.workers.child.program import _main

_LARGE = 1 << 20
"""Bytes from which on a buffer is sent apart, which saves a copy for each worker."""
_DEFINITIONS = (types.FunctionType, type, CACHED)


class Counter:
    """A file that only counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        # A pickler passes large objects directly, outside of its frames.
        size = memoryview(data).nbytes
        self.bytes += size
        return size


class CallPickler(_by_value.Pickler):
    """
    Pickler that notes the definitions of ``__main__`` that it sends by value.

    Objects that cannot be imported are sent by value too. Definitions of *main* that workers
    import are sent by name; its other functions share the variables of the import.
    """

    def __init__(self, file: io.BytesIO | Counter, apart: bool = False, main: ImportableMain | None = None) -> None:
        self.large: list[pickle.PickleBuffer] = []

        # Not a bound method: that would keep all pickled objects until the garbage collector
        # runs.
        callback = functools.partial(_is_small, self.large) if apart else None
        super().__init__(file, protocol=5, buffer_callback=callback)
        self.definitions: dict[str, Any] = {}
        self.by_value: list[Any] = []
        """Functions and classes that are sent with their captures."""
        self.of_main: list[Any] = []
        """Functions and classes of a ``__main__`` that workers import."""
        self.files: set[str] = set()
        self.shared: list[Memory] = []
        self._main = main
        self._variables = _ScriptVariables()
        self._apart = apart
        self._storages: dict[tuple[int, int], _Storage] = {}

    def dump(self, obj: Any) -> None:
        """Pickle *obj*, and share the memory that multiprocessing can share."""
        with _shared_arguments.spawning(self.shared):
            super().dump(obj)

    def _storage(self, obj: Any) -> Any:
        """Reduce a storage of torch's; views of one memory stay views of one."""
        memory = obj._untyped_storage
        if memory.device.type != "cpu":
            return NotImplemented
        # Empty ones are all at address 0.
        address = memory.data_ptr() if memory.nbytes() else memory._cdata
        place = address, memory.nbytes()
        found = self._storages.setdefault(place, _Storage(memory))
        return _buffers.typed, (found, obj.dtype)

    def _memory_of(self, storage: _Storage) -> Any:
        memory = storage.memory
        size = memory.nbytes()
        if size and memory.is_shared():
            # Such as a file that may only be read: its content is sent.
            with contextlib.suppress(OSError):
                make, shared = _shared(memory)
                self.shared.append(shared)
                return make, (len(self.shared) - 1, size)

        view: Any = bytearray()
        if size:
            view = (ctypes.c_char * size).from_address(memory.data_ptr())
            # The view alone does not keep the tensor's memory.
            view.owner = memory

        return _buffers.storage_of, (pickle.PickleBuffer(view),)

    def reducer_override(self, obj: Any) -> Any:
        if self._apart and _is_typed_storage(type(obj)):
            return self._storage(obj)
        if isinstance(obj, _Storage):
            return self._memory_of(obj)
        if isinstance(obj, _ScriptVariables):
            return _main.namespace, ()
        if isinstance(obj, _DEFINITIONS):
            return self._reduced_definition(obj)
        return self._reduced(obj)

    def _reduced_definition(self, obj: Any) -> Any:
        """Reduce a function or class, or the result of ``functools.lru_cache``."""
        if self._main is not None and self._main.is_own(obj):
            return self._of_imported_main(obj, self._main)
        if isinstance(obj, CACHED):
            return self._reduced_cached(obj)

        if _is_of_main(obj):
            self._note_definition(obj)
        reduced = self._reduced(obj)

        # All others are sent by their name.
        if isinstance(reduced, tuple):
            self.by_value.append(obj)
        return reduced

    def _reduced_cached(self, obj: Any) -> Any:
        # By its own rule it would be sent by its name, which workers do not have.
        if type(obj) is CACHED and _is_of_main(obj):
            return _sent_cached(obj)
        return self._reduced(obj)

    def _note_definition(self, obj: Any) -> None:
        """Note a function or class that ``__main__`` has under its own name."""
        name = obj.__qualname__
        if name.isidentifier() and getattr(sys.modules.get("__main__"), name, None) is obj:
            self.definitions[name] = obj

    def _reduced(self, obj: Any) -> Any:
        """Reduce *obj* as multiprocessing shares it, else by value if it cannot be imported."""
        if isinstance(obj, types.CodeType):
            self.files.add(obj.co_filename)
        if _is_get_ipython(obj):
            return _function.no_ipython_here, ()
        shared = _shared_arguments.reduced(obj)
        if shared is not NotImplemented:
            return shared
        return super().reducer_override(obj)

    def _of_imported_main(self, obj: Any, main: ImportableMain) -> Any:
        """
        Reduce a function or class of the script to its name, or to the variables of the worker's
        import.
        """
        self.of_main.append(obj)
        if main.defines(obj):
            return _main.of_main, (obj.__qualname__,)
        if isinstance(obj, CACHED):
            return _sent_cached(obj)

        reduced = super().reducer_override(obj)
        uses_script = isinstance(obj, types.FunctionType) and obj.__globals__ is main.module.__dict__
        if not uses_script:
            return reduced

        self.files.add(obj.__code__.co_filename)
        self.by_value.append(obj)
        make, (code, _, *parts), state, *rest = reduced
        # cloudpickle's state would set the function's globals anew; it has those of the worker's
        # import.
        without_globals = state[0], {**state[1], "__globals__": {}}
        return make, (code, self._variables, *parts), without_globals, *rest


def _is_typed_storage(kind: type) -> bool:
    return kind.__name__ == "TypedStorage" and kind.__module__ == "torch.storage"


def _is_get_ipython(obj: Any) -> bool:
    """Return True for the method of IPython's shell that each cell finds as ``get_ipython``."""
    if not isinstance(obj, types.MethodType) or obj.__name__ != "get_ipython":
        return False
    return obj.__func__.__module__.partition(".")[0] == "IPython"


def _is_of_main(obj: Any) -> bool:
    return getattr(obj, "__module__", None) == "__main__"


class _ScriptVariables:
    """Placeholder for the variables of a script that workers import."""


def _sent_cached(call: Any) -> tuple[Any, ...]:
    """
    Return the reduction of a function with ``functools.lru_cache``: without its cached values.
    """
    parameters = call.cache_parameters()
    return _function.cached, (parameters["maxsize"], parameters["typed"]), call.__wrapped__, None, None, _function.wrap


def _is_small(large: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """
    Return True if *buffer* stays in the pickle; otherwise add it to the *large* ones, which are
    sent apart.
    """
    size = buffer.raw().nbytes
    if size < _LARGE or not can_be_apart([*(each.raw().nbytes for each in large), size]):
        return True
    large.append(buffer)
    return False


class _Storage:
    """Placeholder for the memory of tensors, one for all views of it."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


def _shared(memory: Any) -> tuple[Callable[[int, int], Any], Memory]:
    """
    Return the function that makes the storage *memory* in a worker, and the descriptor behind it.
    """
    if memory.filename is not None:
        return _buffers.shared_storage, Memory(os.open, memory.filename, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _buffers.shared_storage, Memory(os.dup, memory._get_shared_fd())
    except RuntimeError:  # it has a name, by torch's strategy "file_system"
        name = os.fsdecode(memory._share_filename_cpu_()[1])
        return _buffers.named_storage, Memory(os.open, f"/dev/shm{name}", os.O_RDWR | os.O_CLOEXEC)
