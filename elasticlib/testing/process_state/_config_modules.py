"""
Values set in torch's configuration modules (``torch._dynamo.config`` and others).

Their values are not attributes but entries with a default, an override by the program and more, so
neither ``vars`` nor pickle sees them. Values that pytest's process has set, by
``config.patch(...)`` or otherwise, are set in the ranks for the test.

Rules of this file: torch's classes are used only if a program has loaded them. Reading the values
imports nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeAlias

from elasticlib.workers.child import is_module, names_of_module

Choices: TypeAlias = Mapping[tuple[str, str], Any]
"""Values that differ from the defaults, by module and name, such as ``triton.cudagraphs``."""

_OF_MODES = frozenset({("torch._inductor.config", "deterministic")})
"""Entries that torch sets together with one of its modes (`_torch_modes`)."""
_Entry: TypeAlias = tuple[tuple[str, str], Callable[[], Any], Any]
_found: tuple[int, list[_Entry]] = (0, [])
"""Number of modules that were loaded, and the entries of the configuration modules among them."""


def is_config(owner: object) -> bool:
    """Return whether *owner* is one of torch's configuration modules, or a part of one."""
    torchs: Any = sys.modules.get("torch.utils._config_module")
    kinds = tuple(getattr(torchs, name, ()) for name in ("ConfigModule", "SubConfigProxy"))
    return any(isinstance(kind, type) and issubclass(type(owner), kind) for kind in kinds)


def choices() -> Choices:
    """Return the values that currently differ from their defaults."""
    torchs: Any = sys.modules.get("torch.utils._config_module")
    unset = getattr(torchs, "_UNSET_SENTINEL", None)
    return {
        place: value
        for place, override, default in _entries(unset)
        if (value := override()) is not unset and value is not default
        # Reading an entry of lists or sets copies it, even if it still has its default.
        if value != default
    }


def _entries(unset: object) -> list[_Entry]:
    """Return each entry with a function that reads its override, and with its default."""
    global _found
    # Modules are rarely removed, so their number shows whether some were added.
    if _found[0] != len(sys.modules):
        loaded = list(sys.modules.values())
        modules = [each for each in loaded if is_module(each) and is_config(each)]
        _found = len(loaded), [each for module in modules for each in _entries_of(module, unset)]
    return _found[1]


def _entries_of(module: ModuleType, unset: object) -> Iterator[_Entry]:
    for name, entry in names_of_module(module).get("_config", {}).items():
        place = module.__name__, name
        # An alias is seen in the module that it stands for.
        if place not in _OF_MODES and getattr(entry, "alias", None) is None:
            of_variable = getattr(entry, "env_value_default", unset)
            yield place, _override(entry), entry.default if of_variable is unset else of_variable


def _override(entry: Any) -> Callable[[], Any]:
    if isinstance(entry.user_override, ContextVar):
        return entry.user_override.get
    # torch before 2.10 has the value itself.
    return lambda: entry.user_override


@contextlib.contextmanager
def as_there(wanted: Choices) -> Iterator[None]:
    """Set the *wanted* values within the block; restore those that the block has not changed."""
    before = {}
    now = choices()
    try:
        for place, value in wanted.items():
            if place not in now or now[place] != value:
                module = importlib.import_module(place[0])
                before[place] = getattr(module, place[1])
                setattr(module, place[1], value)
        yield
    finally:
        for place, value in before.items():
            module = sys.modules[place[0]]
            # A value that the test itself has set stays, and is reported.
            if getattr(module, place[1]) == wanted[place]:
                setattr(module, place[1], value)
