"""
How a function travels to the workers: by value where they could not import it, checked before anything starts.

Functions and classes of ``__main__`` (a script's or a notebook's) travel with their definitions, which
the worker puts into its own ``__main__``, and with the source lines of cells for tracebacks.
"""

from __future__ import annotations

import io
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
from attrs import frozen

from elasticlib.errors import PicklingError
from elasticlib.spec import entrypoint_name


@frozen
class Packed:
    """A function with its arguments, ready to be sent."""

    function: bytes
    """Pickle of (function, args, kwargs), and behind it of the definitions by name."""
    definitions: bytes
    """Pickle of the definitions alone; empty when there are none."""
    names: frozenset[str]
    """Names of the definitions."""
    sources: dict[str, list[str]]
    """Lines of files that only exist in this process, by file name."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes what of ``__main__`` is sent by value, and sends what cannot be imported so as well."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.definitions: dict[str, Any] = {}
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)) and getattr(obj, "__module__", None) == "__main__":
            name = obj.__qualname__
            if name.isidentifier() and getattr(sys.modules.get("__main__"), name, None) is obj:
                self.definitions[name] = obj
        if isinstance(obj, types.CodeType):
            self.files.add(obj.co_filename)
        return super().reducer_override(obj)


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
    """
    Pickle a call. Raises `PicklingError` that names the part which cannot be sent.

    A function of a module that the workers could not import is sent by value, with its module's globals
    that it uses.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        with _sent_by_value(_unimportable_module(function)):
            pickler.dump((function, tuple(args), dict(kwargs)))
            pickler.dump(pickler.definitions)  # of one pickler, so that both speak of the same objects
            definitions = _dump(pickler.definitions) if pickler.definitions else b""
    except Exception as error:
        raise PicklingError(_complaint(function, args, kwargs, error)) from error
    return Packed(buffer.getvalue(), definitions, frozenset(pickler.definitions), _sources(pickler.files))


_registry_lock = threading.Lock()


@contextmanager
def _sent_by_value(module: types.ModuleType | None) -> Iterator[None]:
    """Have cloudpickle send *module*'s functions by value, unless the user has it do so anyway."""
    if module is None:
        yield
        return
    with _registry_lock:
        if module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unimportable_module(function: Callable[..., Any]) -> types.ModuleType | None:
    """The module of *function* when a worker, with our ``sys.path`` and import hooks, would not find it."""
    name = getattr(function, "__module__", None) or "builtins"
    module = sys.modules.get(name)
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
        if entry is not None and len(entry) == 4 and not os.path.exists(name):
            lines[name] = list(entry[2])
    return lines


def _complaint(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    name = entrypoint_name(function)
    parts: dict[str, Any] = {f"argument {index} of {name}": value for index, value in enumerate(args)}
    parts |= {f"argument {key}= of {name}": value for key, value in kwargs.items()}
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = getattr(function, "__closure__", None) or ()
        for variable, cell in zip(code.co_freevars, cells, strict=True):
            try:
                parts[f"variable {variable!r} that {name} captures"] = cell.cell_contents
            except ValueError:
                continue  # not bound yet
        for variable in code.co_names:
            if variable in function.__globals__:
                parts[f"global variable {variable!r} that {name} uses"] = function.__globals__[variable]
    for part, value in parts.items():
        try:
            _dump(value)
        except Exception as cause:
            return (
                f"{part}, a {type(value).__qualname__}, cannot be sent to the workers: {cause}; "
                "make it inside the function instead"
            )
    return f"{name} cannot be sent to the workers: {type(error).__name__}: {error}"
