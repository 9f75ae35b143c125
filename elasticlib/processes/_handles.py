"""
Handles of processes: who holds one can wait for the end of a process and signal it, and never hits another process
that got its number.

Rules of this file: the standard library only; a process that is already gone when it is to be held, or signalled, is a
ProcessLookupError, as of `os.kill`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence


class Handle:
    """A process, held by a pidfd, which is this object's own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor, readable when the process has ended; -1 once closed."""
        return self._descriptor

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, signum: int) -> None:
        """Signal the process. Raises `ProcessLookupError` when it is gone, `PermissionError` when it may not be."""
        signal.pidfd_send_signal(self._descriptor, signum)

    def reap(self) -> None:
        """Of a child: take its exit status from the kernel, if it has ended and nobody else has done so."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Let go of it; may come twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def handle_of(pid: int) -> Handle:
    """Hold the process that now has this number. Raises OSError: there is none, or no descriptor is free."""
    return Handle(os.pidfd_open(pid))


def handle_of_parent(pid: int) -> Handle:
    """Hold the parent of this process, which the caller compares with `os.getppid` afterwards. Raises OSError."""
    return Handle(os.pidfd_open(pid))


@contextlib.contextmanager
def own_descriptors() -> Iterator[tuple[int, ...]]:
    """What another process gets, over a socket, to hold this one by `received_handle`; ours are closed afterwards."""
    descriptor = os.pidfd_open(os.getpid())
    try:
        yield (descriptor,)
    finally:
        os.close(descriptor)


def received_handle(descriptors: Sequence[int]) -> Handle:
    """A handle of the process that sent these, its `own_descriptors`, which are this object's from now on."""
    (descriptor,) = descriptors
    return Handle(descriptor)


def wait_for_ends(handles: Iterable[Handle], limit: float) -> None:
    """Return when all these processes have ended, after *limit* s at most."""
    poll = select.poll()
    waiting = 0
    for handle in handles:
        poll.register(handle, select.POLLIN)
        waiting += 1
    deadline = time.monotonic() + limit
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            poll.unregister(descriptor)
            waiting -= 1
