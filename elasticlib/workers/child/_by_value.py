"""
Pickling of functions and classes by value, with cloudpickle, for those that only one side has.

Rules of this file: it is imported when an object is pickled by value, and not before, because the
project may have a module ``cloudpickle`` of its own.
"""

from __future__ import annotations

import io
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import cloudpickle

from elasticlib.workers.child._loaded import is_module, names_of_module
from elasticlib.workers.child.program import _main


def _code_of(file: str, make: Callable[..., types.CodeType], *parts: Any) -> types.CodeType:
    return make(*parts).replace(co_filename=file)


def _reduced(code: types.CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code_of, (code.co_filename, make, *parts)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """
    cloudpickle's pickler with the file names of functions, which its version 3.1.3 leaves out:
    tracebacks need them.
    """

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {types.CodeType: _reduced}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        if _is_module_of_a_class_of_its_own(obj):
            return cloudpickle.Pickler.dispatch_table[types.ModuleType](obj)
        return super().reducer_override(obj)


def _is_module_of_a_class_of_its_own(value: object) -> bool:
    """
    Return True for modules such as ``torch._dynamo.config``: cloudpickle sends only plain modules
    by their names.
    """
    if type(value) is types.ModuleType or not is_module(value):
        return False
    name = names_of_module(value).get("__name__")
    return isinstance(name, str) and sys.modules.get(name) is value


class ResultPickler(Pickler):
    """
    Sends classes that launcher and worker both have in ``__main__`` by name, so that they stay
    the same.
    """

    def __init__(self, file: io.BytesIO, shared: Collection[str] | None) -> None:
        super().__init__(file)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)) and getattr(obj, "__module__", None) in _main.NAMES:
            name = obj.__qualname__
            known = self._shared is None or name in self._shared
            if known and _main.attribute(sys.modules["__main__"], name) is obj:
                return _main.of_main, (name,)
        return super().reducer_override(obj)
