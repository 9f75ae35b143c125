"""
The key of a fork server, which launches must share to use the same one, and the check that its
imports are unchanged.

Rules of this file: it looks at files, and imports none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from attrs import frozen
from typing_extensions import Self

from elasticlib.preload import _allowed
from elasticlib.processes import time_of_change
from elasticlib.spec import AUTO

_INSTALLED_ONCE = frozenset({"torch", "numpy", "triton"})


def import_path() -> list[str]:
    """Return ``sys.path`` without entries that Python skips, such as a ``pathlib.Path``."""
    return [folder for folder in sys.path if isinstance(folder, str)]


def depends_on_path(preload: Sequence[str]) -> bool:
    """
    Return True if another search path may find other modules to preload.

    Torch is installed once, with its interpreter.
    """
    return tuple(preload) != AUTO and any(module.partition(".")[0] not in _INSTALLED_ONCE for module in preload)


@frozen
class ForkServerKey:
    """
    Properties that two launches must share to use one fork server, besides the variables that it
    has read.
    """

    python: str
    preload: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Options of the interpreter."""
    is_automatic: bool = False
    """
    True if `preload` was chosen for the launch, from the modules that are imported for every
    program.
    """

    @classmethod
    def of(cls, python: str, preload: tuple[str, ...], path: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Self:
        """Return the key of a launch with that *preload*."""
        is_automatic = preload == AUTO
        return cls(python, (_allowed.TORCH,) if is_automatic else preload, path, flags, is_automatic)

    def covers(self, other: Self) -> bool:
        """
        Return True if a fork server of this key can serve a launch of the *other*: it may have
        imported more.
        """
        are_automatic = self.is_automatic and other.is_automatic
        # Modules that the user named may differ on another path: only an equal key will do.
        if not are_automatic or not other.preload:
            return self == other
        same = (self.python, self.path, self.flags) == (other.python, other.path, other.flags)
        return same and set(other.preload) <= set(self.preload)


def stamps(key: ForkServerKey, search_path: Sequence[str], files: Mapping[str, int]) -> dict[str, int]:
    """
    Return the times of change of the files that the fork server imported, by path (ns).

    These are its *files*, and those that are found now for the modules of *key*. Archives on the
    path count as a whole: nothing looks into them.
    """
    paths = list(files)
    if depends_on_path(key.preload):
        paths += filter(os.path.isfile, search_path)
        for module in key.preload:
            # In the order in which the fork server searches.
            paths += _file_of(module, (*search_path, *sys.path))
    return {path: time_of_change(path) for path in paths}


def _file_of(module: str, folders: Sequence[str]) -> list[str]:
    """Return the first file of *module* in *folders*, if there is one."""
    for folder in folders:
        # An empty entry is the current folder.
        base = os.path.join(folder or ".", *module.split("."))
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            if os.path.isfile(path):
                return [path]
    return []
