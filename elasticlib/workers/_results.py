"""How a worker's return value or exception travels back: classes that both sides have keep their identity."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Collection
from typing import Any

import cloudpickle


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends classes that launcher and worker both have in ``__main__`` by name, so that they stay the same."""

    def __init__(self, file: io.BytesIO, shared: Collection[str] | None) -> None:
        super().__init__(file)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)) and getattr(obj, "__module__", None) == "__main__":
            name = obj.__qualname__
            known = self._shared is None or name in self._shared
            if known and getattr(sys.modules["__main__"], name, None) is obj:
                return str(name)
        return super().reducer_override(obj)


def pack_result(value: Any, shared: Collection[str] | None) -> bytes:
    """Pickle what a worker sends back; *shared* names what the launcher has in its ``__main__`` too (None: all)."""
    buffer = io.BytesIO()
    _ResultPickler(buffer, shared).dump(value)
    return buffer.getvalue()


def pack_exception(error: BaseException, shared: Collection[str] | None) -> bytes:
    """
    Pickle an exception such that it can be rebuilt, also where its class has an ``__init__`` of its own.

    Raises whatever pickling its fields raises.
    """
    try:
        pickled = pack_result(error, shared)
        pickle.loads(pickled)
    except Exception:
        return pack_result(_Rebuilt(type(error), error.args, dict(error.__dict__)), shared)
    return pickled


class _Rebuilt:
    """Stands for an exception in a pickle: it comes out as the exception, made without calling its ``__init__``."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        self._parts = kind, args, fields

    def __reduce__(self) -> Any:
        return rebuild, self._parts


def rebuild(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """An exception of class *kind* with these arguments and fields."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
