"""
Calls that the kernel refuses: whether it has them, and how a user makes room where it has none left.

Whether it has one is asked once in each program, by trying it: a container may refuse calls that are there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

FEW_DESCRIPTORS = "; raise the limit of open files (ulimit -n)"
FEW_PROCESSES = "; raise the limit of processes (ulimit -u, or the cgroup's pids.max)"
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Refusal:
    """Why what *tried* does, by the calls of these *names*, cannot be done here."""

    def __init__(self, names: str, tried: Callable[[], object]) -> None:
        self._names = names
        self._tried = tried
        self._known: str | None = None

    def why(self) -> str:
        """In words; empty where it can be done, and while no descriptor is free to try it."""
        if self._known is None:
            self._known = self.ask()
        return self._known or ""

    def ask(self) -> str | None:
        """As `why`, asked now; None where that cannot be known."""
        try:
            self._tried()
        except AttributeError as error:
            return f"this Python has no {error.name}"
        except OSError as error:
            return None if error.errno in _NO_ROOM else f"{self._names}: {error.strerror}"
        return ""
