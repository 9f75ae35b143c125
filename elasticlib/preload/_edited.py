"""
Modules of the user's project that were edited since this program imported them: its workers import the new ones.

Rules of this file: it looks at files that are there and imports nothing; a module is spoken of once for each edit.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER

from elasticlib.stacks import is_users
from elasticlib.workers.child import file_of_module, names_of_module

_log = logging.getLogger("elasticlib")
_BYTECODE = struct.Struct("<4sIII")
"""Begins a file of bytecode: what tells the version, flags, then time and size of the source (PEP 552)."""


class Edits:
    """What is known of the modules of this program, from one launch of a function to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, int]] = {}
        """By name of the module, what tells this import of it from the next one, and the time of its file."""
        self._others: set[str] = set()
        """Files that are no project's."""
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def tell(self) -> None:
        """Say which modules changed on disk since the last call, unless this program has reloaded them."""
        with self._lock:
            edited = [name for name, module in list(sys.modules.items()) if self._is_edited(name, module)]
        if edited:
            _log.warning(
                "%s changed on disk since this program imported %s: the workers have what is in the file now, this "
                "program what it imported; importlib.reload(...) makes them the same",
                ", ".join(edited),
                "it" if len(edited) == 1 else "them",
            )

    def _is_edited(self, name: str, module: object) -> bool:
        file, spec = file_of_module(module), names_of_module(module).get("__spec__")
        if name == "__main__" or file is None or type(spec) is not ModuleSpec or file in self._others:
            return False
        if not is_users(file):
            self._others.add(file)
            return False
        try:
            found = os.stat(file)
        except OSError:
            return False
        former = self._known.get(name)
        self._known[name] = spec, found.st_mtime_ns
        if former is None:
            return _was_edited(spec, found)
        return former[0] is spec and former[1] != found.st_mtime_ns


def _was_edited(spec: ModuleSpec, found: os.stat_result) -> bool:
    """
    Whether the module of *spec*, of which nothing is known, was imported from another state of the file than *found*.

    Its bytecode tells: whoever imports a file that has another time or size than that says writes it anew.
    """
    if type(spec.loader) is not SourceFileLoader or spec.cached is None or sys.dont_write_bytecode:
        return False
    try:
        with open(spec.cached, "rb") as file:
            magic, flags, seconds, size = _BYTECODE.unpack(file.read(_BYTECODE.size))
    except (OSError, struct.error):
        return False
    if magic != MAGIC_NUMBER or flags or not os.access(os.path.dirname(spec.cached), os.W_OK):
        return False
    return bool((seconds, size) != (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF))


EDITS = Edits()
