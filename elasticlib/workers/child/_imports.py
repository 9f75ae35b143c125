"""
What a worker imports: noted, and given back where the fork server has imported it ahead (`preload="learn"`).

Both hang on one thing: the class whose objects Python enters while it looks for a module that is not in
``sys.modules``. No finder, no hook and no frame of ours is there for the user's code to see. What was imported ahead is
kept out of ``sys.modules`` until the program imports it; then it comes with all that its import had done: variables,
warning filters, finders. A module that the program never imports is not there, as in a fresh interpreter.

Rules of this file: an import never fails, nor waits, because it is noted; only installed modules are ever noted, never
the user's own files; what comes is the very module that was imported ahead, so that there are never two of one.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from attrs import Factory, define, frozen

bootstrap: Any = importlib._bootstrap
"""Where Python's import statement is written in Python."""
_ROOM = 1 << 18
"""Bytes for what one worker imports: thousands of names."""
_HEAD = struct.Struct("<QBB")
"""How many bytes of notes there are, whether some had no room, and whether an import is under way."""
_UNDER_WAY = 9
"""Where that last one is."""


@frozen
class Import:
    """One import of an installed module by a worker's program, or by what the program imports."""

    name: str
    origin: str
    """The file it came from."""
    changed: frozenset[str] = frozenset()
    """Variables that the program had set or removed before."""
    cost: int = 0
    """Milliseconds that it took."""

    def plain(self) -> list[Any]:
        """For a channel or a file."""
        return [self.name, self.origin, sorted(self.changed), self.cost]

    def joined(self, other: Import) -> Import:
        """With what is known of the same import by another worker, or of another run."""
        return Import(self.name, self.origin, self.changed | other.changed, max(self.cost, other.cost))

    @classmethod
    def of(cls, body: Any) -> Import:
        """What `plain` made. Raises `ValueError` for anything else."""
        match body:
            case [str(name), str(origin), list(changed), int(cost)] if all(isinstance(each, str) for each in changed):
                if all(part.isidentifier() for part in name.split(".")):
                    return cls(name, origin, frozenset(changed), cost)
        raise ValueError(f"{body!r} names no import")


def without(wanted: Sequence[Import], refused: Mapping[str, Sequence[Any]]) -> list[Import]:
    """
    What to import ahead of what is *wanted*: in place of a module that is refused, what it imports of other packages.

    Of a package of which anything is refused, nothing is imported in place of something else.
    """
    found = dict[str, Import]()
    packages = {name.partition(".")[0] for name in refused}
    left = list(reversed(wanted))
    known = set[str]()
    while left:
        each = left.pop()
        if each.name not in refused:
            found.setdefault(each.name, each)
        elif each.name not in known:
            known.add(each.name)
            instead = [Import.of(body) for body in reversed(refused[each.name][1])]
            left += [some for some in instead if some.name in refused or some.name.partition(".")[0] not in packages]
    return list(found.values())


class Notes:
    """Memory that a worker and its spawner share: what the worker has imported so far."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _ROOM)
        self._end = 0

    def add(self, found: Import) -> None:
        """Note an import; one for which no room is left is dropped, and `whole` says so."""
        line = json.dumps(found.plain()).encode() + b"\n"
        start = self._end
        if start + len(line) > _ROOM:
            _HEAD.pack_into(self._memory, 0, start, 1, 0)
            return
        self._end = start + len(line)
        self._memory[_HEAD.size + start : _HEAD.size + self._end] = line
        _HEAD.pack_into(self._memory, 0, self._end, 0, 0)

    def set_busy(self, is_busy: bool) -> None:
        """Say whether an import is under way."""
        self._memory[_UNDER_WAY] = is_busy

    def busy(self) -> bool:
        """Whether an import is under way."""
        return bool(self._memory[_UNDER_WAY])

    def length(self) -> int:
        """How many bytes were noted."""
        return min(int(_HEAD.unpack_from(self._memory)[0]), _ROOM)

    def read(self) -> list[Import] | None:
        """What was noted, in order, without lines that cannot be understood; None where some had no room."""
        if _HEAD.unpack_from(self._memory)[1]:
            return None
        found = []
        for line in self._memory[_HEAD.size : _HEAD.size + self.length()].splitlines():
            try:
                found.append(Import.of(json.loads(line)))
            except ValueError:  # the worker's program may have written anywhere in its memory
                continue
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


@define(eq=False)
class Span:
    """What one import ahead brought."""

    root: Import
    modules: dict[str, ModuleType]
    """Those that are held back until they are imported."""
    reads: dict[str, str | None] = Factory(dict)
    """Variables that were looked up, with their values at that time."""
    written: dict[str, tuple[str | None, str | None]] = Factory(dict)
    """Variables that were changed: before and after."""
    filters: list[Any] = Factory(list)
    """Of warnings, put before all others."""
    finders: list[Any] = Factory(list)
    """Put on ``sys.meta_path``."""
    parents: dict[str, ModuleType] = Factory(dict)
    """By the name of a submodule, its parent, where that was there before."""


_held: dict[str, ModuleType] = {}
"""What was imported ahead and is not there yet."""
_parents: dict[str, ModuleType] = {}
"""Of which module such a one is an attribute again once it is there."""
_needs: dict[str, set[str]] = {}
"""By its name, what the import of a module that was imported ahead imports in turn."""
_spans: dict[str, Span] = {}
"""By the names of their roots: those whose effects are still to come."""
brought: set[str] = set()
"""Names of modules that were imported ahead and that the program has imported since."""


def hold(spans: Sequence[Span], needs: Mapping[str, set[str]]) -> None:
    """
    In a fork server: what was imported ahead is not there until it is imported, by a worker or by this process.

    Here and not in each worker, since who takes an object out of a dictionary writes to its page.
    """
    for span in spans:
        for name, parent in span.parents.items():
            delattr(parent, name.rpartition(".")[2])
        for name in span.modules:
            sys.modules.pop(name, None)
        _held.update(span.modules)
        _parents.update(span.parents)
        _spans[span.root.name] = span
    for name, some in needs.items():
        _needs[name] = _needs.get(name, set()) | some
    _watch(None)


def give_all() -> None:
    """Have all that was imported ahead be there: in a process of ours that runs none of the user's code."""
    sys.modules.update(_held)
    for name, parent in _parents.items():
        setattr(parent, name.rpartition(".")[2], _held[name])
    _held.clear()
    _parents.clear()


def _bring(name: str) -> None:
    """Have module *name* be there, with all that its import imports, as if it were imported now."""
    if not _resolves_to_ours(name.partition(".")[0]):
        return
    wanted, left = dict[str, ModuleType](), [name]
    while left:
        each = left.pop()
        module = None if each in wanted else _held.get(each)
        if module is not None:
            wanted[each] = module
            left += _needs.get(each, ())
            left.append(each.rpartition(".")[0])
    found = {each: module for each, module in wanted.items() if each not in sys.modules}
    brought.update(found)
    sys.modules.update(found)  # all at once: another thread may import one of them
    for each, module in wanted.items():
        _held.pop(each, None)
        if (parent := _parents.pop(each, None)) is not None and each in found:
            setattr(parent, each.rpartition(".")[2], module)
        if (span := _spans.pop(each, None)) is not None:
            _take_effect(span)


def _take_effect(span: Span) -> None:
    """Have the process be as the import leaves it."""
    _warn_of_changes(span)
    for variable, (before, after) in span.written.items():
        if os.environ.get(variable) == before:
            _put(variable, after)
    if span.filters:
        warnings.filters[0:0] = [each for each in span.filters if each not in warnings.filters]  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
    sys.meta_path.extend(each for each in span.finders if each not in sys.meta_path)


def _put(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _resolves_to_ours(package: str) -> bool:
    """Whether an import of *package* would find, here and now, what was imported ahead; else that is forgotten."""
    expected = origin_of(_held.get(package))
    if package in sys.modules or expected is None:
        return True
    found = bootstrap._find_spec(package, None)
    if found is not None and found.origin == expected:
        return True
    for name in [name for name in _held if name.partition(".")[0] == package]:
        del _held[name]
    return False


def _warn_of_changes(span: Span) -> None:
    changed = sorted(name for name, value in span.reads.items() if os.environ.get(name) != value)
    if changed:
        print(
            f"elasticlib: {', '.join(changed)} was set after {span.root.name} had read it: it has no effect here, "
            "but will in the next run; set it before the launch, or launch with --preload torch",
            file=sys.stderr,
        )


def loaded(name: str) -> bool:
    """Whether module *name* is there, or held back."""
    return name in sys.modules or name in _held


def module(name: str) -> Any:
    """Module *name* if it is there, or held back; else None."""
    return sys.modules.get(name) or _held.get(name)


class Installed:
    """Knows the files of this interpreter and of what is installed for it."""

    def __init__(self) -> None:
        # Not by site or sysconfig, which look up variables that a fork server would depend on then.
        folders = [os.path.dirname(os.__file__)]
        folders += [each for each in sys.path if os.path.basename(each) in ("site-packages", "dist-packages")]
        real = [os.path.realpath(folder) for folder in folders]
        self._folders = tuple({os.path.join(folder, "") for folder in (*folders, *real)})

    def __contains__(self, origin: object) -> bool:
        return isinstance(origin, str) and origin.startswith(self._folders)


def origin_of(module: object) -> str | None:
    """The file of *module* as its import found it; of a compiled-in one ``built-in`` or ``frozen``."""
    return getattr(getattr(module, "__spec__", None), "origin", None)


class _Observer:
    """Notes what this process imports from now on, without what installed modules import in turn."""

    def __init__(self, notes: Notes | None) -> None:
        self._notes = notes
        self._pid = os.getpid()
        self._installed = Installed()
        self._mine = threading.local()
        """
        Of each thread: names whose imports are under way, each with whether an installed module asked for it, and when.
        """
        self._expected: Mapping[str, str] = self._variables()
        """As they would be if the program had changed none."""
        self._changed: set[str] = set()

    @staticmethod
    def _variables() -> dict[str, str]:
        return dict(os.environ._data)  # type: ignore[attr-defined]

    def entered(self, name: str) -> None:
        """The import of *name* begins."""
        if self._notes is None or os.getpid() != self._pid:
            if name in _held:
                _bring(name)
            return
        stack = self._stack()
        nested = bool(stack) and (stack[-1][1] or origin_of(sys.modules.get(stack[-1][0])) in self._installed)
        if not nested:
            self._note_variables()
            self._notes.set_busy(True)
        if name in _held:
            _bring(name)
            self._expected = self._variables()
        stack.append((name, nested, time.monotonic()))

    def left(self, name: str) -> None:
        """The import of *name* is done, or has failed."""
        if self._notes is None or os.getpid() != self._pid:
            return
        stack = self._stack()
        nested, began = False, time.monotonic()
        while stack:  # an interrupt may have kept a name from being taken off
            found, nested, began = stack.pop()
            if found == name:
                break
        if nested:
            return
        self._notes.set_busy(False)
        origin = origin_of(sys.modules.get(name))
        if origin is None or origin not in self._installed:
            return
        cost = int(1000 * (time.monotonic() - began))
        self._notes.add(Import(name, origin, frozenset(self._changed), cost))
        self._expected = self._variables()

    def _stack(self) -> list[tuple[str, bool, float]]:
        try:
            return self._mine.stack  # type: ignore[no-any-return]
        except AttributeError:
            stack = self._mine.stack = []
            return stack

    def _note_variables(self) -> None:
        now: Mapping[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        if now != self._expected:
            both = {*now, *self._expected}
            different = [name for name in both if now.get(name) != self._expected.get(name)]
            self._changed |= {os.fsdecode(name) for name in different}
            self._expected = dict(now)


def begin(notes: Notes) -> None:
    """In a worker, before any of the user's code: note its imports in *notes* from here on."""
    _watch(notes)


def _watch(notes: Notes | None) -> None:
    global _plain
    _plain = _plain or bootstrap._ModuleLockManager
    observer = _Observer(notes)
    bootstrap._ModuleLockManager = lock_with(_plain, observer.entered, observer.left)


_plain: Any = None
"""Python's own class."""


def lock_with(plain: Any, entered: Callable[[str], object], left: Callable[[str], object]) -> type:
    """A class like *plain*, which Python enters while it looks for a module; both are told of each name."""

    class _ModuleLockManager(plain):  # type: ignore[misc]
        def __enter__(self) -> None:
            # Before the lock is taken: what is raised here, such as an interrupt, leaves nothing locked.
            entered(self._name)
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            left(self._name)

    return _ModuleLockManager
