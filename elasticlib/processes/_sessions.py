"""
Sessions of processes that stay alive when their starter ends.

Rules of this file: a stored number is dropped once no process has it, because another session may
get it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from elasticlib.processes._memory_files import anonymous_file

_ENTRY = struct.Struct("=i")
_LONGEST = 1 << 20


class Sessions:
    """Sessions by their numbers; a process is in them (``pid in sessions``) if its session is."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        """Make the sessions of the processes *pids*."""
        self._numbers = {number for pid in pids if (number := _session_of(pid))}

    def numbers(self) -> set[int]:
        """Return the session numbers."""
        return self._numbers

    def __contains__(self, pid: object) -> bool:
        numbers = self.numbers()
        return bool(numbers) and isinstance(pid, int) and _session_of(pid) in numbers


class SharedSessions(Sessions):
    """
    Sessions in a file in memory, which the reaper shares with fork server and spawners.

    A spawner stores the sessions that it keeps, once its workers have succeeded. If processes
    above it are lost, the next one spares these sessions, and no others. The file is a journal,
    so it needs no lock: a negative number drops its session again.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def new(cls) -> SharedSessions:
        """Return an empty object with a file of its own."""
        return cls(anonymous_file("detached sessions"))

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._descriptor

    def numbers(self) -> set[int]:
        found: set[int] = set()
        for (number,) in _ENTRY.iter_unpack(os.pread(self._descriptor, _LONGEST, 0)):
            (found.add if number > 0 else found.discard)(abs(number))
        return found

    def replace(self, former: Sessions, new: Sessions) -> None:
        """Keep the *new* sessions in place of the *former* ones."""
        dropped, added = former.numbers() - new.numbers(), new.numbers() - former.numbers()
        self._write([*(-number for number in dropped), *added])

    def drop_ended(self, pids: Iterable[int]) -> None:
        """Drop the sessions that none of *pids* is in."""
        if kept := self.numbers():
            self._write(-number for number in kept - Sessions(pids).numbers())

    def _write(self, entries: Iterable[int]) -> None:
        # The processes share the file's position too: each write is appended.
        if data := b"".join(map(_ENTRY.pack, entries)):
            os.write(self._descriptor, data)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        # It has ended.
        return 0
