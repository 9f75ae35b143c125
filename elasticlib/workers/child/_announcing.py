"""
Announcements of a worker to its spawner about its program, and the release for which it then
waits.

An outcome is announced when its report is written, through a pipe that all workers of a spawner
share. The spawner's side of both pipes is here too.

Rules of this file: any process may write into that pipe, so invalid announcements are left out.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import struct
from collections.abc import Iterator

from elasticlib.processes import close_each
from elasticlib.workers.child import _report
from elasticlib.workers.child._start_spec import Handed

_NOTICE = struct.Struct("!iBi")
_POURED = 255
"""Mark in place of an outcome: a piece of a report follows, and the number is its bytes."""
_PIECE = select.PIPE_BUF - _NOTICE.size
_MOST_NOTICES = 65536
"""Bytes that a pipe holds."""


class ProgramOutcome(enum.IntEnum):
    """Progress of a worker's program, as it announces it."""

    RAISED = 0
    """An exception ended it; its report is written."""
    RETURNED = 1
    """
    A function returned; its result is written, and with status 0 the process waits for the other
    local ranks.
    """
    ENDED = 2
    """The main part of a script is over, or a function asked to exit, with an exit status."""
    CLOSING = 3
    """Threads and exit handlers are done: only finalizers of the user's code are left."""
    FINAL = 4
    """
    Buffers are written: the status stands, even if the rest of the cleanup ends the process
    otherwise.
    """


_KINDS = frozenset({*map(int, ProgramOutcome), _POURED})


def announce(handed: Handed, outcome: ProgramOutcome, status: int) -> None:
    """
    Report the outcome of this worker's program to the spawner.

    A process that the worker forked reports nothing.
    """
    if os.getpid() != handed.pid:
        return
    # If the pipe is gone, the end of the process says the same.
    with contextlib.suppress(OSError), _pipe(handed) as descriptor:
        os.write(descriptor, _NOTICE.pack(handed.pid, outcome, status))


def await_release(handed: Handed) -> None:
    """
    Wait until the functions of all local ranks have returned, or the round is being stopped.

    A rank that ends closes its connections, and others may be about to use them: gloo connects
    when a connection is first needed. A signal handler that raises ends the wait, and so does a
    program that closed the descriptor. Source: torch's launcher holds the workers of functions in
    the same way.
    """
    # A program that closed the descriptor may have a file of its own under the number.
    if os.getpid() != handed.pid or _report.identity(handed.release) != handed.release_identity:
        return
    with contextlib.suppress(BaseException):
        released = select.poll()
        released.register(handed.release, select.POLLIN)
        released.poll()


def pour(handed: Handed, report: bytes) -> None:
    """
    Send a packed report to the spawner before its outcome is announced, if no file may hold the
    report.

    It is sent through the pipe in pieces that the kernel does not mix with those of other
    workers. Raises OSError.
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
    """
    Announcements of workers, as the spawner reads them from their common pipe: in pieces of any
    length.
    """

    def __init__(self) -> None:
        self._ends = (-1, -1)
        self._unread = b""
        self._poured: dict[int, bytearray] = {}
        """The received part of each worker's report, by pid."""

    def open(self) -> None:
        """Open the pipe."""
        self._ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the end that is readable when `receive` has data."""
        return self._ends[0]

    def for_workers(self) -> tuple[int, tuple[int, int]]:
        """Return the end that workers write to, and its identity."""
        writing = self._ends[1]
        return writing, _report.identity(writing)

    def receive(self) -> bytes:
        """Return the data in the pipe, for `take`; empty without any. It never waits."""
        try:
            return os.read(self._ends[0], _MOST_NOTICES)
        except BlockingIOError:
            return b""

    def take(self, data: bytes) -> Iterator[tuple[int, ProgramOutcome, int]]:
        """
        Yield (pid, outcome, status) of each announcement in *data*; invalid ones are left out.
        """
        self._unread += data
        while len(self._unread) >= _NOTICE.size:
            pid, kind, number = _NOTICE.unpack_from(self._unread)
            size = _NOTICE.size + (number if kind == _POURED else 0)
            if not _NOTICE.size <= size <= select.PIPE_BUF or kind not in _KINDS:
                # Another program wrote into the pipe: the start of the next notice is not known.
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
        """
        Return the packed report that the worker has sent, and forget it.

        Empty if the worker wrote it to its file.
        """
        return bytes(self._poured.pop(pid, b""))


class RoundRelease:
    """
    The pipe at which functions that have returned wait, until those of all local ranks have.

    It is written to once a round. A byte releases them, not a closed end, because other processes
    may hold copies of the end.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = ()

    def begin_round(self) -> None:
        """Hold returned functions from now on. Raises OSError if no descriptor is free."""
        self.close()
        self._ends = os.pipe2(os.O_CLOEXEC)

    def for_workers(self) -> tuple[int, tuple[int, int]]:
        """Return the end that workers wait at, and its identity."""
        reading, _ = self._ends
        return reading, _report.identity(reading)

    def give(self) -> None:
        """Release all functions that wait now, or later."""
        for writing in self._ends[1:]:
            os.write(writing, b".")

    def own(self) -> tuple[int, ...]:
        """Return the descriptors that workers need not hold."""
        return self._ends[1:]

    def close(self) -> None:
        """Close the descriptors."""
        close_each(self._ends)
        self._ends = ()
