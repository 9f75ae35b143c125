"""
State of pytest's process that is sent to the ranks with a test: modules, patches, filters and more.

Rules of this file: an error names the value that cannot be sent, before the ranks get the test.
Nothing here changes pytest's process.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeGuard
from unittest import mock

import pytest

from elasticlib.stacks import is_users
from elasticlib.testing.process_state import _config_modules
from elasticlib.testing.pytest_plugin.rank import _run
from elasticlib.testing.pytest_plugin.rank._modules import ModulePlace, Setting
from elasticlib.testing.ranks._rank_call import MadeUp, Patch
from elasticlib.testing.ranks._refusal import CannotTravelError, why_not
from elasticlib.workers.child import names_of_class, names_of_module

_REWRITER = "AssertionRewritingHook"
_INI = ("python_files", "truncation_limit_lines", "truncation_limit_chars", "verbosity_assertions")
_patches: weakref.WeakSet[Any] = weakref.WeakSet()
"""All ``MonkeyPatch`` objects of pytest since `watch_patches`."""
_mocks: list[Any] = []
"""Active patches of ``unittest.mock``, in order."""


def setting_of(config: Any) -> Setting:
    lines = ["[pytest]"]
    for name in (*_INI, "assertion_text_diff_style"):
        try:
            value = config.getini(name)
        except (KeyError, ValueError):
            # Another version lacks the name.
            continue
        if value:
            parts = value if isinstance(value, list) else [value]
            text = "\n    ".join(map(str, parts))
            lines.append(f"{name} = {text}")

    return Setting(str(config.rootpath), "\n".join(lines) + "\n", config.get_verbosity())


class Modules:
    """
    Modules that pytest has imported and that ranks must find in the same place.

    Without it, ranks might not find them, or would not rewrite their assertions.
    """

    def __init__(self) -> None:
        self._count = 0
        self.known: dict[str, ModulePlace] = {}

    def look(self, always: Iterable[ModuleType]) -> dict[str, ModulePlace]:
        for module in always:
            self._add(module)
        # The number shows at once that nothing was imported since the last test.
        if len(sys.modules) != self._count:
            for module in filter(_is_rewritten, list(sys.modules.values())):
                self._add(module)
            self._count = len(sys.modules)
        return self.known

    def _add(self, module: ModuleType) -> None:
        name, file = module.__name__, getattr(module, "__file__", None)
        if name in self.known or not file or not is_users(file):
            return
        self.known[name] = _place_of(module)
        # Ranks import the packages above a module first.
        while sys.modules.get(name := name.rpartition(".")[0]) is not None:
            self.known.setdefault(name, _place_of(sys.modules[name]))


def _is_rewritten(module: ModuleType) -> bool:
    spec = names_of_module(module).get("__spec__")
    return type(spec) is ModuleSpec and type(spec.loader).__name__ == _REWRITER


def _place_of(module: ModuleType) -> ModulePlace:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    folders = tuple(map(str, getattr(module, "__path__", ())))
    return ModulePlace(getattr(module, "__file__", None) or "", folders, type(loader).__name__ == _REWRITER)


def explaining(config: Any) -> tuple[str, ...]:
    """Return the names of the user's modules that explain comparisons in assertions."""
    found = []
    for each in config.hook.pytest_assertrepr_compare.get_hookimpls():
        name = getattr(each.plugin, "__name__", "")
        # A rank has pytest's own explanations already, and can import the others by name.
        if isinstance(each.plugin, ModuleType) and name in sys.modules and not name.startswith("_pytest."):
            found.append(name)
    return tuple(found)


class PytestWork:
    """Functions that workers run for pytest; see `SessionWork`."""

    run = staticmethod(_run.run)
    look_at_failure = staticmethod(_run.look_at_failure)

    def __init__(self, config: Any) -> None:
        self._setting = setting_of(config)
        self._explains = explaining(config)
        self._modules = Modules()

    def preparation(self, always: Sequence[ModuleType]) -> tuple[object, Any, tuple[Any, ...]]:
        """Return the call that makes modules known to workers; see `SessionWork.preparation`."""
        known = self._modules.look(always)
        names = tuple(module.__name__ for module in always)
        return (len(known), names), _run.prepare, (self._setting, known, self._explains, names)


# Changes by monkeypatch and unittest.mock.


def watch_patches() -> None:
    """Record all patches from now on, and those that exist already."""
    former = pytest.MonkeyPatch.__init__

    # An earlier session of this process watches already.
    if getattr(former, "_elasticlib", False):
        return

    # A conftest may have made some before the first test on ranks was found.
    _patches.update(each for each in gc.get_objects() if type(each) is pytest.MonkeyPatch)
    _mocks.extend(getattr(mock._patch, "_active_patches", ()))
    _watch_mocks(mock._patch, "__enter__", "__exit__")
    _watch_mocks(mock._patch_dict, "_patch_dict", "_unpatch_dict")

    def begin(self: Any) -> None:
        former(self)
        _patches.add(self)

    begin._elasticlib = True  # type: ignore[attr-defined]
    pytest.MonkeyPatch.__init__ = begin  # type: ignore[method-assign]


def _watch_mocks(kind: type, enter: str, leave: str) -> None:
    """Record the active patches of *kind*, whose methods *enter* and *leave* start and end one."""
    begin, end = getattr(kind, enter), getattr(kind, leave)

    @functools.wraps(begin)
    def begun(self: Any) -> Any:
        value = begin(self)
        _mocks.append(self)
        return value

    @functools.wraps(end)
    def ended(self: Any, *args: Any) -> Any:
        _mocks[:] = [each for each in _mocks if each is not self]
        return end(self, *args)

    setattr(kind, enter, begun)
    setattr(kind, leave, ended)


def patches() -> tuple[Patch, ...]:
    """Return the active patches, except those that `config` returns. Raises `CannotTravelError`."""
    found: list[Patch] = []
    for each in _patches:
        found += _of_monkeypatch(each)
    for each in _mocks:
        found += _of_mock(each)
    return tuple(found)


def _of_monkeypatch(patches: Any) -> Iterator[Patch]:
    # pytest has no public list of the patches of a `monkeypatch`.
    for owner, name, _ in patches._setattr:
        if not _is_of_pytest(owner) and not _config_modules.is_config(owner):
            yield _of_attribute("monkeypatch.setattr", owner, name)
    for mapping, key, _ in patches._setitem:
        yield _of_item("monkeypatch.setitem", mapping, key)


def _of_mock(patch: Any) -> Iterator[Patch]:
    if hasattr(patch, "in_dict"):
        now, before = patch.in_dict, patch._original
        for key in {**dict.fromkeys(before), **dict.fromkeys(now)}:
            # patch.dict replaces the whole mapping: only the keys that differ were patched.
            is_same = key in now and key in before and now[key] is before[key]
            if not is_same:
                yield _of_item("mock.patch.dict", now, key)
    elif not _config_modules.is_config(patch.target):
        yield _of_attribute("mock.patch.object", patch.target, patch.attribute)


def _is_of_pytest(owner: Any) -> bool:
    """Return whether *owner* belongs to pytest, whose plugins patch it for the whole session."""
    if isinstance(owner, (pytest.Item, pytest.Config)):
        return True
    name = ""
    if isinstance(owner, ModuleType):
        name = owner.__name__
    elif isinstance(owner, type):
        name = owner.__module__
    return name.partition(".")[0] == "_pytest"


def _of_attribute(how: str, owner: Any, name: str) -> Patch:
    if not isinstance(owner, (ModuleType, type)):
        raise CannotTravelError(
            f"{how}({_short(owner)}, {name!r}, ...): this {type(owner).__qualname__} exists only in pytest's process: "
            "patch its class or a module, or patch it in the test's function"
        )

    where = f"{how}({getattr(owner, '__name__', owner)}, {name!r}, ...)"

    # The patch has deleted the attribute.
    if name not in vars(owner):
        return _checked(Patch(owner, name, is_gone=True), where)

    return _checked(Patch(owner, name, value=vars(owner)[name]), where)


def _of_item(how: str, mapping: Mapping[Any, Any], key: Any) -> Patch:
    # Variables are sent with each call, but a module that the ranks import may also set them.
    owner, name = (os, "environ") if mapping is os.environ else _holder(mapping)
    where = f"{how}({name or _short(mapping)}, {key!r}, ...)"
    if owner is None:
        raise CannotTravelError(
            f"{where}: this {type(mapping).__qualname__} does not exist on the ranks, because no module or "
            "class has it as an attribute: patch it in the test's function"
        )

    # The patch has deleted the key.
    if key not in mapping:
        return _checked(Patch(owner, name, key, is_item=True, is_gone=True), where)

    value = mapping[key]
    if mapping is sys.modules and _is_made_up(value):
        value = _made_up(value)
    return _checked(Patch(owner, name, key, is_item=True, value=value), where)


def _made_up(module: ModuleType) -> MadeUp:
    return MadeUp(module.__name__, {name: each for name, each in vars(module).items() if not name.startswith("__")})


def _is_made_up(value: object) -> TypeGuard[ModuleType]:
    """Return whether *value* is a module that the test has made, which ranks cannot import."""
    return isinstance(value, ModuleType) and getattr(value, "__spec__", None) is None


def _holder(mapping: Any) -> tuple[Any, str]:
    """Return the module or class that has *mapping* as an attribute, and the attribute's name."""
    if mapping is sys.modules:
        return sys, "modules"
    for owner, name, value in _attributes():
        if value is mapping:
            return owner, name
    return None, ""


def _attributes() -> Iterator[tuple[Any, str, Any]]:
    for module in list(sys.modules.values()):
        for name, value in list(names_of_module(module).items()):
            yield module, name, value
            # isinstance would read the object's __class__, which may warn.
            if issubclass(type(value), type):
                for inner, each in list(names_of_class(value).items()):
                    yield value, inner, each


def _checked(patch: Patch, where: str) -> Patch:
    if problem := why_not(patch):
        kind = patch.value.name if isinstance(patch.value, MadeUp) else type(patch.value).__qualname__
        raise CannotTravelError(f"{where}: its value, a {kind}, cannot be sent to the ranks: {problem}")
    return patch


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Settings of libraries.


def config() -> _config_modules.Choices:
    """Return the values set in torch's configuration modules. Raises `CannotTravelError`."""
    choices = _config_modules.choices()
    for (module, name), value in choices.items():
        if problem := why_not(value):
            raise CannotTravelError(
                f"{module}.{name} = {_short(value)}: its value, a {type(value).__qualname__}, cannot be "
                f"sent to the ranks: {problem}"
            )
    return choices


def filters() -> tuple[Any, ...]:
    """Return the warning filters that can be sent to ranks."""
    return tuple(each for each in warnings.filters if _travels(each))


@functools.lru_cache(maxsize=256)
def _travels(warning_filter: tuple[Any, ...]) -> bool:
    return not why_not(warning_filter)


def levels(caplog: Any) -> dict[str, int]:
    changed = getattr(caplog, "_initial_logger_levels", ())
    names = {"", *(name or "" for name in changed)}
    return {name: logging.getLogger(name or None).level for name in names}
