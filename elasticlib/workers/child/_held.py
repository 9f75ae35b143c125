"""
What the fork server has imported ahead, held back until the program imports it (`preload="learn"`).

Rules of this file: what comes is the very module that was imported ahead, so that there are never two of one, with all
that its import brings and sets; what would be found elsewhere by then is forgotten.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence, Set as AbstractSet
from types import ModuleType
from typing import Any

from attrs import field, frozen

from elasticlib.workers.child._import_notes import Import

bootstrap: Any = importlib._bootstrap
"""Where Python's import statement is written in Python."""


@frozen(eq=False)
class Effects:
    """What the import of one module set, besides what the modules that it imports did."""

    written: Mapping[str, tuple[str | None, str | None]] = field(factory=dict)
    """Variables that were changed: before and after."""
    filters: Sequence[Any] = ()
    """Of warnings, put before all others."""
    finders: Sequence[Any] = ()
    """Put on ``sys.meta_path``."""
    replaced: Mapping[str, tuple[ModuleType, ModuleType]] = field(factory=dict)
    """Packages of the module that were there and that it put others in the place of: before and after."""

    def come(self) -> None:
        """Have the process be as the import leaves it."""
        for variable, (before, after) in self.written.items():
            if os.environ.get(variable) != before:
                continue  # the program has its own
            if after is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = after
        if self.filters:
            warnings.filters[0:0] = [each for each in self.filters if each not in warnings.filters]  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        sys.meta_path.extend(each for each in self.finders if each not in sys.meta_path)
        sys.modules.update((package, new) for package, (_, new) in self.replaced.items() if package in sys.modules)


@frozen(eq=False)
class Span:
    """What one import ahead brought."""

    root: Import
    modules: Mapping[str, ModuleType]
    """Those that are held back until they are imported."""
    reads: Mapping[str, str | None] = field(factory=dict)
    """Variables that were looked up, with their values at that time."""
    effects: Mapping[str, Effects] = field(factory=dict)
    """By the name of a module."""
    parents: Mapping[str, Sequence[ModuleType]] = field(factory=dict)
    """By the name of a submodule, its parent where that was there before, and what was put in the place of that."""


_held: dict[str, ModuleType] = {}
"""What was imported ahead and is not there yet, in the order in which it was imported."""
_parents: dict[str, Sequence[ModuleType]] = {}
"""Of which modules such a one is an attribute again once it is there."""
_needs: dict[str, set[str]] = {}
"""By its name, what the import of a module that was imported ahead imports in turn."""
_effects: dict[str, Effects] = {}
"""By the name of a module that was imported ahead."""
_reads: dict[str, Mapping[str, str | None]] = {}
"""By the names of those that were imported ahead for themselves, what they looked up."""
_path: list[str] = []
"""Where these imports looked."""
_finders: list[Any] = []
"""And by whom."""
brought: set[str] = set()
"""Names of modules that were imported ahead and that the program has imported since."""


def hold(spans: Sequence[Span], needs: Mapping[str, set[str]]) -> None:
    """
    In a fork server: what was imported ahead is not there until it is imported, by a worker or by this process.

    Here and not in each worker, since who takes an object out of a dictionary writes to its page.
    """
    settle()
    for span in spans:
        for name, parents in span.parents.items():
            child = name.rpartition(".")[2]
            _parents[name] = [each for each in parents if vars(each).get(child) is span.modules[name]]
            for parent in _parents[name]:
                delattr(parent, child)
        for name in span.modules:
            sys.modules.pop(name, None)
        _held.update(span.modules)
        _effects.update(span.effects)
        _reads[span.root.name] = span.reads
    for name, some in needs.items():
        _needs[name] = _needs.get(name, set()) | some


def give_all() -> None:
    """Have all that was imported ahead be there: in a process of ours that runs none of the user's code."""
    sys.modules.update(_held)
    for name, module in _held.items():
        _set_on_parents(name, module)
    _held.clear()


def bring(name: str) -> None:
    """Have module *name* be there, with all that its import imports, as if it were imported now."""
    _forget(_hidden(_closure(name)))
    wanted = _closure(name) & _held.keys()
    found = {each: module for each, module in _held.items() if each in wanted and each not in sys.modules}
    brought.update(found)
    sys.modules.update(found)  # all at once: another thread may import one of them
    for each in wanted:
        del _held[each]
    for each in found:  # first: what the import sets itself is no news to it
        if (reads := _reads.pop(each, None)) is not None:
            _warn_of_changes(each, reads)
    for each, module in found.items():
        _set_on_parents(each, module)
        if (effects := _effects.pop(each, None)) is not None:
            effects.come()


def _set_on_parents(name: str, module: ModuleType) -> None:
    for parent in _parents.pop(name, ()):
        setattr(parent, name.rpartition(".")[2], module)


def _closure(name: str) -> set[str]:
    """All that the import of *name* looks for, itself and packages included."""
    found, left = set[str](), [name]
    while left:
        each = left.pop()
        if each and each not in found:
            found.add(each)
            if each in _held:
                left += _needs.get(each, ())
                left.append(each.rpartition(".")[0])
    return found


def _hidden(names: Collection[str]) -> set[str]:
    """Packages among *names* that an import would find elsewhere by now."""
    packages = {name.partition(".")[0] for name in names if name in _held}
    packages = {each for each in packages if each not in sys.modules}
    if sys.meta_path == _finders:  # else whoever was added may find anything
        packages &= _names_in(tuple(folder for folder in sys.path if folder not in _path))
    return {each for each in packages if not _is_ours(each)}


@functools.lru_cache(maxsize=4)
def _names_in(folders: tuple[str, ...]) -> AbstractSet[str]:
    """Names of modules that could be in these folders, for which files are enough to look at."""
    found = set[str]()
    for folder in folders:
        try:
            found.update(name.partition(".")[0] for name in os.listdir(folder or "."))
        except OSError:  # an archive, or nothing
            if os.path.exists(folder):
                return _held.keys()
    return found


def _is_ours(package: str) -> bool:
    """Whether an import of *package* would find here and now what was imported ahead."""
    module = _held.get(package)
    expected = origin_of(module)
    if expected is None or not os.path.exists(expected) or name_of(module) != package:
        return True  # a namespace, made by hand, or another name of what is found elsewhere
    spec = bootstrap._find_spec(package, None)
    return spec is not None and spec.origin == expected


def settle() -> None:
    """In a worker, before any of the user's code: remember where and by whom modules are looked for."""
    _path[:], _finders[:] = sys.path, sys.meta_path


def _forget(packages: Collection[str]) -> None:
    """
    Have these be imported anew.

    What imported them ahead keeps what it has: to import that again could register things twice.
    """
    for name in [name for name in _held if name.partition(".")[0] in packages]:
        del _held[name]


def _warn_of_changes(name: str, reads: Mapping[str, str | None]) -> None:
    changed = sorted(each for each, value in reads.items() if os.environ.get(each) != value)
    if changed:
        print(
            f"elasticlib: {', '.join(changed)} was set after {name} had read it: it has no effect here, "
            "but will in the next run; set it before the launch, or launch with --preload torch",
            file=sys.stderr,
        )


def files() -> list[str]:
    """Files of what is held back, without those of Python and torch, which nobody edits while a program runs."""
    of_python = os.path.join(os.path.dirname(os.__file__), "")
    found = {origin_of(module) for name, module in _held.items() if name.partition(".")[0] != "torch"}
    paths = [each for each in found if isinstance(each, str) and os.path.isabs(each)]
    return sorted(each for each in paths if not each.startswith(of_python) or "-packages" in each)


def held() -> Mapping[str, ModuleType]:
    """What was imported ahead and is not there yet."""
    return _held


def loaded(name: str) -> bool:
    """Whether module *name* is there, or held back."""
    return name in sys.modules or name in _held


def module(name: str) -> Any:
    """Module *name* if it is there, or held back; else None."""
    return sys.modules.get(name) or _held.get(name)


def name_of(module: object) -> str | None:
    """The name by which *module* was found, whatever it is called in ``sys.modules``."""
    return getattr(getattr(module, "__spec__", None), "name", None)


def origin_of(module: object) -> str | None:
    """The file of *module* as its import found it; of a compiled-in one ``built-in`` or ``frozen``."""
    return getattr(getattr(module, "__spec__", None), "origin", None)
