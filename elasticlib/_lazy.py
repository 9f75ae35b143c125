"""
Names that a module takes from others: imported at once, or at their first use (PEP 562).

Rules of this file: after its first use a name is an attribute of the module. Type checkers read
the imports, each ``as`` itself, under ``TYPE_CHECKING`` where they are lazy. A typed package
declares its interface in this way.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping


def names(
    module: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """
    Return ``__getattr__``, ``__dir__`` and ``__all__`` for *module*, which takes names from others.

    *modules* is {module that defines the names: the names, separated by spaces}.
    """
    where = {name: each for each, found in modules.items() for name in found.split()}
    own = vars(sys.modules[module])

    def at_first_use(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(where[name]), name)
        own[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*own, *own["__all__"]})

    return at_first_use, listed, sorted(where)


def offer(module: str) -> None:
    """
    Set ``__all__`` of *module* to the public names that it has now, without modules.

    This is done here because type checkers cannot read such an ``__all__``. If they saw it in the
    module, they would hide all names from ``import *``.
    """
    own = vars(sys.modules[module])
    names = (name for name, each in own.items() if not isinstance(each, types.ModuleType))
    own["__all__"] = sorted(name for name in names if not name.startswith("_"))
