"""
Modules of the user's project that were edited since this program imported them: its workers
import the new version.

Rules of this file: it looks at existing files only, and imports nothing. A module is named once
for each edit.
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
"""
Start of a bytecode file: the mark of the version, flags, then time and size of the source (PEP
552).
"""


class Edits:
    """Record of this program's modules, from one launch of a function to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, int]] = {}
        """
        By name of the module: its specification, which differs after a reload, and the time of
        its file (ns).
        """
        self._others: set[str] = set()
        """Files outside of the user's project."""
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # The thread that may have held it does not exist in a forked process.
        self._lock = threading.Lock()

    def warn(self) -> None:
        """
        Warn which modules changed on disk since the last call, unless this program has reloaded
        them.
        """
        with self._lock:
            # A copy, because another thread may import meanwhile.
            edited = [name for name, module in list(sys.modules.items()) if self._is_edited(name, module)]

        if edited:
            _log.warning(
                "%s changed on disk since this program imported %s: the workers use the new code, and this program "
                "still uses the old code; call importlib.reload(...) to update the program",
                ", ".join(edited),
                "it" if len(edited) == 1 else "them",
            )

    def _is_edited(self, name: str, module: object) -> bool:
        """Return True if the file of *module* changed since the last look, or since its import."""
        file, spec = file_of_module(module), names_of_module(module).get("__spec__")
        if name == "__main__" or type(spec) is not ModuleSpec:
            return False
        if file is None or not self._is_of_project(file):
            return False

        try:
            found = os.stat(file)
        except OSError:
            return False

        former = self._known.get(name)
        self._known[name] = spec, found.st_mtime_ns
        if former is None:
            return _was_edited(spec, found)

        former_spec, former_time = former

        # Another specification means that the program has reloaded the module.
        is_same_import = former_spec is spec
        return is_same_import and former_time != found.st_mtime_ns

    def _is_of_project(self, file: str) -> bool:
        # Most modules are those of libraries, whose files are judged only once.
        if file in self._others:
            return False
        if is_users(file):
            return True
        self._others.add(file)
        return False


def _was_edited(spec: ModuleSpec, found: os.stat_result) -> bool:
    """
    Return True if the module of *spec* was imported from another state of its file than *found*.

    Its bytecode shows that: an import writes it again if the file's time or size differs.
    """
    if type(spec.loader) is not SourceFileLoader or spec.cached is None:
        return False
    # Bytecode that the import could not write again may be older than the import.
    if not _imports_write(spec.cached):
        return False
    # Bytecode holds the lowest 32 bits of both.
    of_file = int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF
    written = _source_of_bytecode(spec.cached)
    return written is not None and written != of_file


def _imports_write(bytecode: str) -> bool:
    return not sys.dont_write_bytecode and os.access(os.path.dirname(bytecode), os.W_OK)


def _source_of_bytecode(path: str) -> tuple[int, int] | None:
    """
    Return time and size of the source of the bytecode at *path*; None if the bytecode does not
    hold them.
    """
    try:
        with open(path, "rb") as file:
            magic, flags, seconds, size = _BYTECODE.unpack(file.read(_BYTECODE.size))
    except (OSError, struct.error):
        return None
    # Bytecode of another version, or checked by the hash of the source.
    if magic != MAGIC_NUMBER or flags:
        return None
    return seconds, size


EDITS = Edits()
