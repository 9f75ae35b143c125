"""
Modules of the user's project that share the name of another one, such as a ``queue.py`` or
``numpy.py`` by the script.

An ``import`` of the project finds its own module, as in a program that Python has started. A
process that was forked with imports, or that has run elasticlib's code, first forgets modules of
such names. Modules that imported them keep them.

Rules of this file: modules that a bare interpreter imports before its first line stay, as in
Python. A folder without ``__init__.py`` hides nothing further down the search path.
"""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Sequence

_KEPT = frozenset({"__main__", "__mp_main__", "elasticlib"})
_folders: Sequence[str] = ()
"""
Folders of the project, in a worker: they come before the interpreter's own on the search path.
"""
_at_start: Collection[str] = frozenset()
"""Modules that the interpreter of this process had imported before any of elasticlib's code."""


def note_start(modules: Collection[str]) -> None:
    """Note the *modules* that this process's interpreter itself had imported."""
    global _at_start
    _at_start = modules


def folders_before(search_path: Iterable[str], interpreters: Collection[str]) -> list[str]:
    """Return the folders of the *search_path* that come before the *interpreters* own."""
    return list(itertools.takewhile(lambda folder: folder not in interpreters, search_path))


def make_way(folders: Sequence[str]) -> None:
    """
    Make imports find the modules in *folders* from now on, even if other modules of these names
    were imported.
    """
    global _folders
    _folders = folders
    has_own.cache_clear()
    # A look at each loaded module would copy a page of the fork server's memory for each.
    hidden = hidden_by(folders, sys.modules) - _KEPT
    ours = {name for name in hidden.difference(_at_start) if not _is_from(folders, name)}
    if ours:
        _forget(ours)


def _forget(tops: Collection[str]) -> None:
    """Remove the modules of these top-level names, with those below them."""
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


def _is_from(folders: Sequence[str], name: str) -> bool:
    """
    Return True if the imported module *name* is already the one in *folders*, such as a preloaded
    one.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str):
        return False
    folder, base = os.path.split(file)
    # The file of a package is its __init__, in a folder of its name.
    return (os.path.dirname(folder) if base.startswith("__init__.") else folder) in folders


@functools.cache
def has_own(name: str) -> bool:
    """
    Return True if the project of this process has a module *name* of its own; its folders are
    read once.
    """
    return bool(hidden_by(_folders, {name}))


def hidden_by(folders: Iterable[str], names: Collection[str]) -> set[str]:
    """Return those of the *names* that top-level modules in *folders* have."""
    return {name for folder in folders for name in _found_in(folder, names)}


def _found_in(folder: str, names: Collection[str]) -> Iterable[str]:
    try:
        entries = os.listdir(folder or ".")
    except NotADirectoryError:
        # The folder is an archive, such as a zip file.
        tops = [name for name in names if "." not in name]
        return [name for name in tops if importlib.machinery.PathFinder.find_spec(name, [folder]) is not None]
    except OSError:
        return []
    return [name for entry in entries if (name := entry.partition(".")[0]) in names and _is_module(folder, entry, name)]


def _is_module(folder: str, entry: str, name: str) -> bool:
    suffixes = importlib.machinery.all_suffixes()
    if entry == name:
        return any(os.path.isfile(os.path.join(folder, entry, f"__init__{suffix}")) for suffix in suffixes)
    return entry.removeprefix(name) in suffixes
