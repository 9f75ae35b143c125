"""
What stands in ``sys.modules``, told by its type alone, as CPython does at a program's end.

Programs and libraries put anything there: compiled libraries that only pretend to be modules (cffi), modules that
import something when an attribute is asked for, stand-ins of tests that answer every question. Rules of this file:
such an object is asked for nothing: no attribute, no comparison, no weak reference, and no `isinstance`, which asks
for ``__class__``.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

_names = vars(types.ModuleType)["__dict__"].__get__
"""A module's own names, whatever its class makes of its attributes."""
_names_of_class = vars(type)["__dict__"].__get__


def is_module(found: object) -> bool:
    """Whether *found* is a module, and not just called one."""
    return issubclass(type(found), types.ModuleType)


def names_of_module(found: object) -> dict[str, Any]:
    """The names of the module *found*, its very own; none of anything else."""
    return (_names(found) or {}) if is_module(found) else {}


def names_of_class(kind: type) -> Mapping[str, Any]:
    """The names of the class itself, whatever its own class makes of its attributes; a view, as ``vars`` gives it."""
    return _names_of_class(kind)  # type: ignore[no-any-return]


def file_of_module(found: object) -> str | None:
    """The file that the module *found* was loaded from, where its names tell one."""
    file = names_of_module(found).get("__file__")
    return file if issubclass(type(file), str) else None
