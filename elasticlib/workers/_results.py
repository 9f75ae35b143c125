"""How a worker's return value or exception travels back: classes that both sides have keep their identity."""

from __future__ import annotations

import io
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
