"""
What a module offers of others' names: imported at once, or where they are first used (PEP 562).

Rules of this file: a name that was used once is the module's own from then on. Type checkers read the imports, each as
itself (under ``TYPE_CHECKING`` where they are lazy): that is how a typed package says what it offers.
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
    ``__getattr__``, ``__dir__`` and ``__all__`` of *module*, whose names come from *modules*.

    That is {module that has them: names, with spaces between}.
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
    Make ``__all__`` of *module* of the names that it has by now.

    From here, for an ``__all__`` that type checkers see but cannot read hides all names from ``import *``.
    """
    own = vars(sys.modules[module])
    names = (name for name, each in own.items() if not isinstance(each, types.ModuleType))
    own["__all__"] = sorted(name for name in names if not name.startswith("_"))
