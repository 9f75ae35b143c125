"""
What two launches must have in common to be forked from one fork server, and whether its imports are still the same.

Rules of this file: it looks at files, and imports nothing of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from attrs import frozen
from typing_extensions import Self

from elasticlib.spec import LEARN


def import_path() -> list[str]:
    """``sys.path``, without what Python skips there, such as a ``pathlib.Path``."""
    return [folder for folder in sys.path if isinstance(folder, str)]


def depends_on_path(preload: Sequence[str]) -> bool:
    """Whether another search path may find other modules to preload: torch is installed once, with its interpreter."""
    return tuple(preload) != LEARN and any(module.partition(".")[0] != "torch" for module in preload)


@frozen
class ForkServerKey:
    """What two launches must have in common to fork their workers from one fork server, besides what that has read."""

    python: str
    preload: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Options of the interpreter."""
    learns: bool = False
    """Whether it imports ahead what workers were seen to import."""

    @classmethod
    def of(cls, python: str, preload: tuple[str, ...], path: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Self:
        """The key of a launch with that *preload*."""
        learns = preload == LEARN
        return cls(python, ("torch",) if learns else preload, path, flags, learns)


def stamps(key: ForkServerKey, search_path: Sequence[str]) -> dict[str, float]:
    """When the files of preloaded modules, and archives on the path, were changed."""
    found: dict[str, float] = {}
    for module in key.preload:
        if module.partition(".")[0] == "torch":
            continue  # nobody edits it between two cells, and looking for it costs milliseconds
        # Archives as a whole: what they hold is not looked at.
        found |= {path: os.stat(path).st_mtime_ns / 1e9 for path in search_path if os.path.isfile(path)}
        for folder in (*search_path, *sys.path):
            base = os.path.join(folder or ".", *module.split("."))
            for path in (base + ".py", os.path.join(base, "__init__.py")):
                if os.path.isfile(path) and module not in found:
                    found[module] = os.stat(path).st_mtime_ns / 1e9
    return found


def finds_the_same(
    path: Sequence[str], other: Sequence[str], found: frozenset[str] | None, missing: frozenset[str]
) -> bool:
    """Whether imports that *found* modules on *path*, and others *missing*, do so on the search path *other*."""
    if tuple(path) == tuple(other):
        return True
    if found is None or [folder for folder in other if folder in path] != list(path):
        return False
    sought = missing  # behind all others a folder hides none of their modules
    for folder in reversed(other):
        if folder in path:
            sought = missing | found
            continue
        try:
            # Of my_module.cpython-311-x86_64-linux-gnu.so as of my_module.py and the folder my_module.
            if not sought.isdisjoint(name.partition(".")[0] for name in os.listdir(folder or ".")):
                return False
        except FileNotFoundError:
            continue
        except OSError:
            return False  # an archive, or a folder that cannot be looked into
    return True
