"""
Modules of the user's project that an agent has imported for its calls.

Rules of this file: workers import the present files. So an agent that serves several calls must not keep modules whose
files have changed since: it imports all of the project again, since one module may hold names of another.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elasticlib.stacks import is_users
from elasticlib.workers.child import file_of_module


class CallModules:
    """Record of the modules that the calls of this agent have imported."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, int | None]] = {}
        """File and its time of change (ns; None: it is missing), by name of the module."""

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let imports within the block find the present files."""
        self._forget_changed()
        importlib.invalidate_caches()
        known = set(sys.modules)
        try:
            yield
        finally:
            self._note(set(sys.modules) - known)

    def _forget_changed(self) -> None:
        if all(_time_of(file) == time for file, time in self._files.values()):
            return
        for name in self._files:
            sys.modules.pop(name, None)
        self._files.clear()

    def _note(self, names: Iterable[str]) -> None:
        for name in names:
            file = file_of_module(sys.modules.get(name))
            if file is not None and is_users(file):
                self._files[name] = file, _time_of(file)


def _time_of(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
