"""
What a worker announces to its spawner of its program, and the release that it then waits for.

An outcome is announced when its report is written, through a pipe that all workers of a spawner share. Rules of this
file: anybody may write into that pipe, so what is no announcement is left out.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import struct
from collections.abc import Iterator

from elasticlib.workers.child import _report
from elasticlib.workers.child._start_spec import Handed

_NOTICE = struct.Struct("!iBi")
_POURED = 255
"""In place of an outcome: so many bytes of a report follow."""
_PIECE = select.PIPE_BUF - _NOTICE.size


class ProgramOutcome(enum.IntEnum):
    """How far a worker's program has come, in its own words."""

    RAISED = 0
    """An exception ended it; its report is written."""
    RETURNED = 1
    """A function returned; its result is written, and with status 0 the process waits for the other local ranks."""
    ENDED = 2
    """The main part of a script is over, or a function called for the end, with an exit status."""
    CLOSING = 3
    """Threads and exit handlers are done: nothing of the user's is left but finalizers."""
    FINAL = 4
    """What was in buffers is written: the status stands, whatever the rest of the cleaning up does to the process."""


_KINDS = frozenset({*map(int, ProgramOutcome), _POURED})


def announce(handed: Handed, outcome: ProgramOutcome, status: int) -> None:
    """Tell the spawner what has become of this worker's program; a process that the worker forked tells nothing."""
    if os.getpid() != handed.pid:
        return
    # Where the pipe is gone, the end of the process says as much.
    with contextlib.suppress(OSError), _pipe(handed) as descriptor:
        os.write(descriptor, _NOTICE.pack(handed.pid, outcome, status))


def await_release(handed: Handed) -> None:
    """
    Wait until the functions of all local ranks have returned, or the round is being stopped.

    A rank that ends closes its connections, which others may be about to use: gloo connects when it is needed first.
    A signal handler that raises ends the wait, as does a program that closed the descriptor. Source: torch's launcher
    holds the workers of functions in the same way.
    """
    if os.getpid() != handed.pid or _report.identity(handed.release) != handed.release_identity:
        return
    with contextlib.suppress(BaseException):
        released = select.poll()
        released.register(handed.release, select.POLLIN)
        released.poll()


def pour(handed: Handed, report: bytes) -> None:
    """
    Leave a packed report that no file may hold with the spawner, before its outcome is announced.

    It goes through the pipe in pieces that the kernel does not mix with those of other workers. Raises OSError.
    """
    with _pipe(handed) as descriptor:
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        for begin in range(0, len(report), _PIECE):
            piece = report[begin : begin + _PIECE]
            # The spawner reads as fast as it can.
            room.poll()
            while not _is_written(descriptor, _NOTICE.pack(handed.pid, _POURED, len(piece)) + piece):
                room.poll()


def _is_written(descriptor: int, data: bytes) -> bool:
    try:
        os.write(descriptor, data)
    except BlockingIOError:
        # Another worker was faster, and the pipe is full.
        return False
    return True


@contextlib.contextmanager
def _pipe(handed: Handed) -> Iterator[int]:
    descriptor = _report.reopened(handed.notices, handed.notices_identity, handed.spawner)
    try:
        yield descriptor
    finally:
        if descriptor != handed.notices:
            os.close(descriptor)


class Notices:
    """What workers announce, as the spawner reads it: the pipe gives it in pieces of any length."""

    def __init__(self) -> None:
        self._unread = b""
        self._poured: dict[int, bytearray] = {}
        """By pid, as much as has come of the worker's report."""

    def take(self, data: bytes) -> Iterator[tuple[int, ProgramOutcome, int]]:
        """(pid, outcome, status) of each announcement in *data*; what is none is left out."""
        self._unread += data
        while len(self._unread) >= _NOTICE.size:
            pid, kind, number = _NOTICE.unpack_from(self._unread)
            size = _NOTICE.size + (number if kind == _POURED else 0)
            if not _NOTICE.size <= size <= select.PIPE_BUF or kind not in _KINDS:
                # Another program wrote into the pipe: the place where the next notice begins is not
                # known.
                self._unread = b""
            elif len(self._unread) < size:
                return
            elif kind == _POURED:
                self._poured.setdefault(pid, bytearray()).extend(self._unread[_NOTICE.size : size])
                self._unread = self._unread[size:]
            else:
                self._unread = self._unread[size:]
                yield pid, ProgramOutcome(kind), number

    def report_of(self, pid: int) -> bytes:
        """The packed report that the worker has poured, which is forgotten here; empty where its file has it."""
        return bytes(self._poured.pop(pid, b""))
