"""
Handles of processes: a holder can wait for the end and send signals, and never hits a process
that reuses the number.

Rules of this file: each program asks the kernel once, by a call and not by its version. Holding
or signalling a process that is gone is a ProcessLookupError, as in `os.kill`.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Iterator, Sequence

from elasticlib._clock import monotonic, sleep
from elasticlib.processes import _without_pidfds as without_pidfds
from elasticlib.processes._pidfd import Handle, pidfds

_LOOK = 0.005
"""
Seconds between two looks at processes that are being killed, if the kernel does not report their
ends.
"""


def handle_of(pid: int) -> Handle:
    """
    Return a handle of the process that now has this number.

    Raises OSError if it is gone or no descriptor is free.
    """
    return without_pidfds.handle_of(pid) if pidfds.why() else Handle(os.pidfd_open(pid))


def handle_of_parent(pid: int) -> Handle:
    """
    Return a handle of this process's parent. Raises OSError.

    The caller must compare *pid* with `os.getppid` afterwards.
    """
    return without_pidfds.Parent(pid) if pidfds.why() else Handle(os.pidfd_open(pid))


@contextlib.contextmanager
def own_descriptors() -> Iterator[tuple[int, ...]]:
    """
    Yield the descriptors to send to another process, which holds this one by `received_handle`.

    The context manager owns them; the caller must not close them.
    """
    if pidfds.why():
        yield without_pidfds.own_descriptors()
        return
    descriptor = os.pidfd_open(os.getpid())
    try:
        yield (descriptor,)
    finally:
        os.close(descriptor)


def received_handle(descriptors: Sequence[int]) -> Handle:
    """
    Return a handle of the process that sent its `own_descriptors`; the handle owns them from now
    on.
    """
    # A process that has no pidfds sends pipes.
    if stat.S_ISFIFO(os.fstat(descriptors[0]).st_mode):
        return without_pidfds.PipeHandle(*descriptors)
    return Handle(*descriptors)


def wait_for_ends(handles: Sequence[Handle], limit: float) -> None:
    """Return when all these processes have ended, after at most *limit* seconds."""
    deadline = monotonic() + limit
    if pidfds.why():
        _look_for_ends(handles, deadline)
        return

    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    waiting = len(handles)
    while waiting and (left := deadline - monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            # An ended process stays readable: each further poll would return at once.
            poll.unregister(descriptor)
            waiting -= 1


def _look_for_ends(handles: Sequence[Handle], deadline: float) -> None:
    """Wait without pidfds: look at the processes repeatedly."""
    while not all(handle.has_ended() for handle in handles):
        if monotonic() >= deadline:
            return
        sleep(_LOOK)
