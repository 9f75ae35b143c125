"""
Whether a script could import a module, by the import statements in its text: asked where no run has shown it yet.

Rules of this file: in doubt it could; nothing is run, and no more files are read than a few of the script's own.
"""

from __future__ import annotations

import ast
import enum
import os
import sys
from collections.abc import Iterator

_MOST_FILES = 100
_MOST_BYTES = 1 << 20
_BY_NAME = frozenset({"importlib", "runpy", "pkgutil", "imp"})
"""Modules that import by names that no statement has."""


class Reach(enum.Enum):
    """What the text of a script says of a module."""

    NAMED = "an import statement names it"
    MAYBE = "what is installed, or imported by names that no statement has, may import it"
    NO = "nothing that is imported could"


def reach(module: str, script: str, folder: str) -> Reach:
    """How *script*, or a file in *folder* that it imports, reaches *module*."""
    left, seen, found = [script], {script}, Reach.NO
    while left:
        path = left.pop()
        try:
            if os.path.getsize(path) > _MOST_BYTES:
                found = Reach.MAYBE
                continue
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            found = Reach.MAYBE
            continue
        for name, is_module in _names(tree):
            own = _files(name, folder, os.path.dirname(path))
            top = name.partition(".")[0]
            if is_module and not own and top == module:
                return Reach.NAMED
            if is_module and not own and (top in _BY_NAME or top not in sys.stdlib_module_names):
                found = Reach.MAYBE
            left += [each for each in own if each not in seen]
            seen.update(own)
        if len(seen) > _MOST_FILES:
            return Reach.MAYBE
    return found


def _names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """
    What is imported anywhere, in functions too, and whether it must be a module: ``from a import b`` may mean another.

    Dots come first where it is relative.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((each.name, True) for each in node.names)
            case ast.ImportFrom():
                base = "." * node.level + (node.module or "")
                yield base, not base.endswith(".")
                yield from ((f"{base}{'' if base.endswith('.') else '.'}{each.name}", False) for each in node.names)
            case ast.Name(id="__import__" | "exec" | "eval"):
                yield "importlib", True


def _files(name: str, folder: str, here: str) -> list[str]:
    """The project's own files that an import of *name* runs, from a file in the folder *here*."""
    level = len(name) - len(name.lstrip("."))
    for _ in range(level - 1):
        here = os.path.dirname(here)
    base, found = here if level else folder, []
    for part in name[level:].split("."):
        base = os.path.join(base, part)
        candidates = (os.path.join(base, "__init__.py"), f"{base}.py")
        found += [each for each in candidates if os.path.isfile(each)][:1]
    return found
