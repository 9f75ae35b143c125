"""
Calls that the kernel refuses, and the limits that leave no room for a call.

Each program asks once, by trying the call: a container may refuse calls that the kernel has.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

FEW_DESCRIPTORS = "; raise the limit of open files (ulimit -n)"
FEW_PROCESSES = "; raise the limit of processes (ulimit -u, or the cgroup's pids.max)"
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Refusal:
    """The reason why the kernel refuses the calls *names*, which *tried* makes."""

    def __init__(self, names: str, tried: Callable[[], object]) -> None:
        self._names = names
        self._tried = tried
        self._known: str | None = None

    def why(self) -> str:
        """
        Return the reason; empty if the calls work, and while no descriptor is free to try them.
        """
        if self._known is None:
            self._known = self.ask()
        return self._known or ""

    def ask(self) -> str | None:
        """Try now, and return the reason as `why` does; None if it cannot be known."""
        try:
            self._tried()
        except AttributeError as error:
            return f"this Python has no {error.name}"
        except OSError as error:
            # The lack of a descriptor or of memory says nothing about the kernel.
            return None if error.errno in _NO_ROOM else f"{self._names}: {error.strerror}"
        return ""
