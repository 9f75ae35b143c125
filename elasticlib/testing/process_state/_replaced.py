"""
Detection of library functions and methods that a test has replaced.

An example is ``torch.nn.Linear.forward = mine``.

Rules of this file: only the classes of the user's own modules are checked, because a module may
keep what tests assign to it. A library may replace its own functions, as optimizers do when first
used.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

from elasticlib.stacks import is_users
from elasticlib.workers.child import file_of_module, names_of_class, names_of_module

Functions: TypeAlias = Mapping[str, Any]
"""Functions of one module or class, by name."""

_KINDS = (FunctionType, BuiltinFunctionType, classmethod, staticmethod, property)
_MODULES = (
    "builtins json os random socket subprocess time torch torch.cuda torch.distributed "
    "torch.distributed.distributed_c10d torch.nn.functional"
).split()
_ROOTS = (
    ("torch.nn.modules.module", "Module"),
    ("torch.optim", "Optimizer"),
    ("torch", "Tensor"),
    ("torch.utils.data", "DataLoader"),
    ("torch.utils.data", "Dataset"),
)
"""Classes, by module and name, that are checked together with the subclasses in libraries."""

_FAMILIES = ("torch.nn.", "torch.optim.", "torch.utils.data.", "torch.distributed.fsdp.")
"""Prefixes of the modules that define these subclasses."""
_owners: tuple[int, dict[str, Mapping[str, Any]]] = (0, {})
"""Number of modules that were loaded, and the members of each checked module and class."""
_seen: dict[str, tuple[tuple[str, ...], tuple[Any, ...], Functions]] = {}
"""By owner: names that ever held a function, their values, and these as a mapping."""


def functions() -> dict[str, Functions]:
    global _owners
    # Modules are rarely removed, so their number shows whether some were added.
    if _owners[0] != len(sys.modules):
        _owners = len(sys.modules), dict(_found())
    return {name: _functions_of(name, members) for name, members in _owners[1].items()}


def _functions_of(name: str, members: Mapping[str, Any]) -> Functions:
    # This check must be quick. Mostly nothing has changed, and the same mapping is returned.
    names, values, functions = _seen.get(name, ((), (), {}))
    if name not in _seen or not all(map(operator.is_, map(members.get, names), values)):
        new = [each for each, value in members.items() if issubclass(type(value), _KINDS)]
        functions = {each: members.get(each) for each in (*names, *new)}
        _seen[name] = tuple(functions), tuple(functions.values()), functions
    return functions


def _found() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _MODULES:
        yield name, names_of_module(sys.modules.get(name))
    for module, name in _ROOTS:
        yield from _of_root(module, name)
    for found in list(sys.modules.values()):
        if _is_users_module(found):
            yield from _classes_of(names_of_module(found))


def _of_root(module: str, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    root = names_of_module(sys.modules.get(module)).get(name)
    if isinstance(root, type):
        yield f"{module}.{name}", names_of_class(root)
        yield from _below(root)


def _is_users_module(module: Any) -> bool:
    file = file_of_module(module)
    return file is not None and is_users(file)


def _below(root: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
    derived: list[type] = type.__subclasses__(root)
    for each in derived:
        yield from _with_derived(each)


def _with_derived(kind: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the members of *kind* and of its subclasses in libraries, not of classes of a test."""
    module = sys.modules.get(kind.__module__)
    is_known = names_of_module(module).get(kind.__name__) is kind
    if is_known and kind.__module__.startswith(_FAMILIES):
        yield f"{kind.__module__}.{kind.__name__}", names_of_class(kind)
        yield from _below(kind)


def _classes_of(names: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    module = names.get("__name__")
    for name, value in list(names.items()):
        if issubclass(type(value), type) and type.__getattribute__(value, "__module__") == module:
            yield f"{module}.{name}", names_of_class(value)


def replaced(before: Mapping[str, Functions], after: Mapping[str, Functions]) -> list[str]:
    """Return the names of the functions that were replaced or deleted."""
    found = []
    for owner, now in after.items():
        then = before.get(owner, now)
        # The same object means that nothing has changed.
        if then is not now:
            names = [name for name, function in then.items() if _is_replaced(function, now.get(name), owner)]
            found += [f"{owner}.{name}" for name in names]
    return found


def _is_replaced(before: Any, now: Any, owner: str) -> bool:
    return now is not before and not _is_the_librarys_own(now, owner)


def _is_the_librarys_own(function: Any, owner: str) -> bool:
    """Return whether the library of *owner* defines *function*, not a test or a patching tool."""
    function = getattr(function, "__func__", getattr(function, "fget", function))
    if not isinstance(function, FunctionType) or is_users(function.__code__.co_filename):
        return False
    # A decorator may have copied the function's __module__ from another one.
    module = str(function.__globals__.get("__name__"))
    return module.partition(".")[0] == owner.partition(".")[0]
