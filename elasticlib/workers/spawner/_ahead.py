"""
Imports done once for all workers, which nobody asked for: the modules that workers were seen to import.

Afterwards the process must be as if nothing had been imported, but for what `Span` knows how to give to a worker when
it imports: what modules an import brings, and what it sets. Who imports what is seen in two ways: what is loaded
belongs to the import that is under way, what is there already to the import statement that asks for it.

Rules of this file: in doubt a module is refused; nothing of the observation is left when the imports are done; who
imports for later uses does not take CPU time from workers that run.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import select
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from elasticlib.workers.child import _held, _imports, _showing
from elasticlib.workers.child._held import Effects, Span
from elasticlib.workers.child._import_notes import Import
from elasticlib.workers.spawner import _leftovers
from elasticlib.workers.spawner._observer import Observer
from elasticlib.workers.spawner._reads import PER_LAUNCH

_SHARE = 3
"""Of the time in which others wanted its CPU, a process that imports for later uses one part in so many more."""
_WAITED = 1_000_000
"""Nanoseconds in the kernel's queue that count as waiting for others."""


class SpoiltError(Exception):
    """An import left behind what a worker could not do with, or what it must do by itself; which one may be unknown."""

    def __init__(self, module: str, why: str, instead: Sequence[Import] = ()) -> None:
        super().__init__(f"{module}: {why}")
        self.module = module
        self.why = why
        self.instead = list(instead)
        """What it imports of other packages, which may do."""


def hold_torch() -> None:
    """Hold torch back, which was imported ahead: so it can be told whether a worker imports it."""
    found = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "torch"}
    origin = _held.origin_of(sys.modules.get("torch"))
    if origin is not None:
        _held.hold([Span(Import("torch", origin), found)], {"torch": set(found)})
        _imports.watch()


def import_ahead(
    wanted: Sequence[Import], own: Collection[str], paced: bool, trying: Callable[[str], object] = bool
) -> list[str]:
    """
    Import what workers were seen to import, in their order, and hold it back; the names.

    *own* are variables that each worker has for itself. Where *paced*, others come first, and what each import changes
    is looked at after it; else that is looked at once, since somebody waits. *trying* gets each name before. Raises
    `SpoiltError`: this process is not fit to be forked then.
    """
    found = list[Span]()
    temporary, _ = tempfile.tempdir, tempfile.gettempdir()  # which writes a file to see whether it can
    course = _Course(paced)
    with _leftovers.Output() as output:
        state = _leftovers.State()
        for each in wanted:
            if _held.loaded(each.name):
                continue
            before = set(sys.modules)
            trying(each.name)
            try:
                found.append(_import(each, {*own, *PER_LAUNCH}, output, state if paced else None, course))
                state.grow()
            except SpoiltError as error:
                new = [name for name in sys.modules if name not in before]
                error.instead = _of_other_packages(each, new, course.needs)
                raise
        if not paced and (different := state.differences(but=_replaced(course.effects))):
            raise SpoiltError("", f"the imports change {', '.join(different[:3])}")
    tempfile.tempdir = temporary  # each worker looks for a folder by itself
    trying("")
    _settle(found)
    _held.hold(found, course.needs)
    _imports.watch()
    return [span.root.name for span in found]


def _of_other_packages(wanted: Import, new: Sequence[str], needs: Mapping[str, set[str]]) -> list[Import]:
    """What the package of *wanted* has imported of others, of the modules that are *new*."""
    package, installed = wanted.name.partition(".")[0], _imports.Installed()
    asked = {name for importer, some in needs.items() if importer.partition(".")[0] == package for name in some}
    found = [name for name in new if name in asked and name.partition(".")[0] != package]
    if _showing.SHELL in new:  # all of its package would bring it
        found = [name for name in found if name.partition(".")[0] != _showing.SHELL.partition(".")[0]]
    origins = {name: _held.origin_of(sys.modules.get(name)) for name in found}
    return [
        Import(name, origin, wanted.changed, wanted.cost)
        for name, origin in origins.items()
        if origin in installed and origin and name.replace(".", "_").isidentifier()
    ]


class _Course:
    """Sees who imports what, and who sets what; leaves the CPUs to others where it is *paced*."""

    def __init__(self, paced: bool) -> None:
        self.needs: dict[str, set[str]] = {}
        """By the name of a module, what its import imports in turn."""
        self.effects: dict[str, Effects] = {}
        self._under_way: list[str] = []
        self._packages: dict[str, ModuleType] = {}
        """Of the modules that were imported."""
        self._surroundings = self._look()
        self._paced = paced
        self._ran, self._waited = _schedule()

    @contextmanager
    def observing(self, acts: list[str]) -> Iterator[None]:
        """Observe imports in the block; what went wrong with that is added to *acts*."""
        plain = _held.bootstrap._ModuleLockManager
        self._surroundings = self._look()
        ours = _imports.lock_with(plain, self._entered, self._left)
        _held.bootstrap._ModuleLockManager = ours
        try:
            with _leftovers.replaced(acts) as replace:
                replace(builtins, "__import__", self._noting(builtins.__import__))
                replace(importlib, "import_module", self._noting_by_name(importlib.import_module))
                yield
        finally:
            if _held.bootstrap._ModuleLockManager is not ours:
                acts.append("replaces how Python imports")
            _held.bootstrap._ModuleLockManager = plain

    @staticmethod
    def _look() -> tuple[dict[bytes, bytes], list[Any], list[Any]]:
        # What the environment keeps: to go through it itself would be noted as a copy that the import has made.
        return dict(os.environ._data), list(warnings.filters), list(sys.meta_path)  # type: ignore[attr-defined]

    def _entered(self, name: str) -> None:
        if self._paced:
            self._pause()
        self._under_way.append(name)
        for package in _packages_of(name):
            if package in sys.modules:
                self._packages.setdefault(package, sys.modules[package])

    def _left(self, name: str) -> None:
        while self._under_way and self._under_way.pop() != name:
            pass
        if self._under_way:
            self.needs.setdefault(self._under_way[-1], set()).add(name)
        variables, filters, finders = self._surroundings
        now, replaced = self._look(), self._replaced_by(name)
        if now != self._surroundings or replaced:
            written = {each: (variables.get(each), now[0].get(each)) for each in {*variables, *now[0]}}
            self.effects[name] = Effects(
                {os.fsdecode(each): (_text(old), _text(new)) for each, (old, new) in written.items() if old != new},
                [each for each in now[1] if each not in filters],
                [each for each in now[2] if each not in finders],
                replaced,
            )
            self._surroundings = now

    def _replaced_by(self, name: str) -> dict[str, tuple[ModuleType, ModuleType]]:
        """Packages of the module *name* that are others by now: before and after."""
        before = {package: self._packages[package] for package in _packages_of(name) if package in self._packages}
        found = {each: (old, new) for each, old in before.items() if (new := sys.modules.get(each, old)) is not old}
        self._packages.update((package, new) for package, (_, new) in found.items())
        return found

    def _note(self, importer: object, name: str, items: Sequence[str]) -> None:
        spec = getattr(sys.modules.get(str(importer)), "__spec__", None)
        if not getattr(spec, "_initializing", False):
            return  # a function imports it, when it is called
        some = self.needs.setdefault(str(importer), set())
        some.add(name)
        if "*" in items:
            items = getattr(sys.modules.get(name), "__all__", ())
        some.update(f"{name}.{item}" for item in items)

    def _noting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def noted(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            found = plain(name, globals, locals, fromlist, level)
            if globals is not None:
                whole = name
                if level:
                    package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
                    whole = importlib.util.resolve_name("." * level + name, package)
                self._note(globals.get("__name__"), whole, fromlist or ())
            return found

        return noted

    def _noting_by_name(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def noted(name: str, package: str | None = None) -> Any:
            found = plain(name, package)
            whole = importlib.util.resolve_name(name, package) if name.startswith(".") else name
            self._note(sys._getframe(1).f_globals.get("__name__"), whole, ())
            return found

        return noted

    def _pause(self) -> None:
        """A nice value could not be taken back."""
        ran, waited = _schedule()
        if waited - self._waited > _WAITED:
            select.poll().poll(_SHARE * (ran - self._ran) / 1e6)
            self._ran, self._waited = _schedule()
        elif ran - self._ran > 100 * _WAITED:
            self._ran, self._waited = ran, waited


def _packages_of(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _text(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _import(
    wanted: Import, own: Collection[str], output: _leftovers.Output, state: _leftovers.State | None, course: _Course
) -> Span:
    observer, modules = Observer(), dict(sys.modules)
    there = {**_held.held(), **modules}
    variables, acts = dict(os.environ), list[str]()
    why: str | None
    try:
        with course.observing(acts), _leftovers.acts_stopped(acts):
            why = _leftovers.why_refused(wanted.name, observer)
    except (Exception, SystemExit) as error:
        why = f"its import fails with {type(error).__name__}: {error}"
    reads = {*observer.names, *observer.defaults}
    if acts:
        why = f"its import {' and '.join(dict.fromkeys(acts))}"
    if why is None and _held.origin_of(sys.modules.get(wanted.name)) != wanted.origin:
        why = f"it is found elsewhere than in the worker, where it was {wanted.origin}"
    if why is None and output.written():
        why = "its import writes to the console"
    if why is None and (changed := sorted(reads & {*wanted.changed, *own})):
        why = f"its import reads {', '.join(changed)}, which the program sets, or which each worker has for itself"
    if why is None and wanted.changed and observer.copied:
        why = f"its import copies the environment, of which the program changes {', '.join(sorted(wanted.changed))}"
    new = {name: module for name, module in list(sys.modules.items()) if name not in modules}
    if why is None and _showing.SHELL in new:
        why = "its import brings IPython's shell, of which each worker has its own"
    effects = {name: each for name, each in course.effects.items() if name in new}
    if why is None and state is not None and (different := state.differences(but=_replaced(effects))):
        why = f"its import changes {', '.join(different[:3])}"
    if why is not None:
        raise SpoiltError(wanted.name, why)
    asked = set[str]().union(*course.needs.values())
    for name in new.keys() - asked:  # an extension module may be there by another name too
        found = _held.name_of(new[name])
        course.needs.setdefault(found if found in new and found != name else wanted.name, set()).add(name)
    looked_up = {name: variables.get(name) for name in reads}
    return Span(wanted, new, looked_up, effects, _parents(new, there))


def _replaced(effects: Mapping[str, Effects]) -> set[str]:
    return {package for each in effects.values() for package in each.replaced}


def _parents(new: Mapping[str, ModuleType], before: Mapping[str, ModuleType]) -> dict[str, list[ModuleType]]:
    """By the name of a submodule, its parent, where that had been imported before, and the one that it has now."""
    found = {}
    for name, module in new.items():
        above, _, child = name.rpartition(".")
        if name not in before and above in before:
            parents = {id(each): each for each in (before[above], _held.module(above))}
            found[name] = [each for each in parents.values() if vars(each).get(child) is module]
    return found


def _settle(found: Sequence[Span]) -> None:
    """Take back what workers get when they import: filters of warnings, finders, other modules of their packages."""
    effects = [each for span in found for each in span.effects.values()]
    for each in reversed(effects):
        sys.modules.update((package, old) for package, (old, _) in each.replaced.items())
    filters = [each for effect in effects for each in effect.filters]
    warnings.filters[:] = [each for each in warnings.filters if each not in filters]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    finders = [each for effect in effects for each in effect.finders]
    sys.meta_path[:] = [each for each in sys.meta_path if each not in finders]


def _schedule() -> tuple[int, int]:
    """Nanoseconds in which this process ran, and in which it waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.process_time_ns(), 0
    return ran, waited
