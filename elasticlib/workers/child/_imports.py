"""
What a worker's program imports: noted, and given to it where that was imported ahead (`preload="learn"`).

Both hang on one thing: the class whose objects Python enters while it looks for a module that is not in
``sys.modules``. No finder, no hook and no frame of ours is there for the user's code to see.

Rules of this file: an import never fails, nor waits, because it is noted; only installed modules are ever noted, never
the user's own files.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticlib.workers.child import _held
from elasticlib.workers.child._held import bootstrap, origin_of
from elasticlib.workers.child._import_notes import Import, Notes


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
            if name in _held.held():
                _held.bring(name)
            return
        stack = self._stack()
        nested = bool(stack) and (stack[-1][1] or origin_of(sys.modules.get(stack[-1][0])) in self._installed)
        if not nested:
            self._note_variables()
            self._notes.set_busy(True)
        if name in _held.held():
            _held.bring(name)
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
        if nested and name != "torch":  # whoever asks for torch, it decides what the fork server begins with
            return
        if not nested:
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
    _held.settle()
    watch(notes)


def watch(notes: Notes | None = None) -> None:
    """From here on what is held back comes when it is imported, and what is imported is written into *notes*."""
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
