"""
Safe look at ``sys.modules``: its objects are recognized by their type alone, as CPython does at a
program's end.

Programs and libraries put any object there: compiled libraries that only pretend to be modules
(cffi), modules that import something on attribute access, test stand-ins that answer every
question.

Rules of this file: it uses no attribute of such an object, no comparison, no weak reference, and
no `isinstance`, which reads ``__class__``.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

_names = vars(types.ModuleType)["__dict__"].__get__
"""Returns a module's own names, even if its class overrides its attributes."""
_names_of_class = vars(type)["__dict__"].__get__


def is_module(found: object) -> bool:
    """Return True if *found* is a module, and not just called one."""
    return issubclass(type(found), types.ModuleType)


def names_of_module(found: object) -> dict[str, Any]:
    """Return the names of the module *found*, without its class's; {} for any other object."""
    return (_names(found) or {}) if is_module(found) else {}


def names_of_class(kind: type) -> Mapping[str, Any]:
    """
    Return the names of the class itself, even if its metaclass overrides attributes; a view, like
    that of ``vars``.
    """
    return _names_of_class(kind)  # type: ignore[no-any-return]


def file_of_module(found: object) -> str | None:
    """Return the file that the module *found* was loaded from; None if its names do not show it."""
    file = names_of_module(found).get("__file__")
    return file if issubclass(type(file), str) else None
