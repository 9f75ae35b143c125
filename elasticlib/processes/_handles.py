"""
Who holds a process can wait for its end and signal it, and never hits another process that got its number.

Rules of this file: the kernel is asked once in each program, by a call and not by its version; a process that is gone
when it is to be held, or signalled, is a ProcessLookupError, as of `os.kill`.
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
"""Seconds between two looks at processes that are just being killed, where nothing tells of their ends."""


def handle_of(pid: int) -> Handle:
    """Hold the process that now has this number. Raises OSError: there is none, or no descriptor is free."""
    return without_pidfds.handle_of(pid) if pidfds.why() else Handle(os.pidfd_open(pid))


def handle_of_parent(pid: int) -> Handle:
    """Hold the parent of this process, which the caller compares with `os.getppid` afterwards. Raises OSError."""
    return without_pidfds.Parent(pid) if pidfds.why() else Handle(os.pidfd_open(pid))


@contextlib.contextmanager
def own_descriptors() -> Iterator[tuple[int, ...]]:
    """What another process gets, over a socket, to hold this one by `received_handle`; the caller keeps nothing."""
    if pidfds.why():
        yield without_pidfds.own_descriptors()
        return
    descriptor = os.pidfd_open(os.getpid())
    try:
        yield (descriptor,)
    finally:
        os.close(descriptor)


def received_handle(descriptors: Sequence[int]) -> Handle:
    """A handle of the process that sent these, its `own_descriptors`, which are this object's from now on."""
    if stat.S_ISFIFO(os.fstat(descriptors[0]).st_mode):
        return without_pidfds.PipeHandle(*descriptors)
    return Handle(*descriptors)


def wait_for_ends(handles: Sequence[Handle], limit: float) -> None:
    """Return when all these processes have ended, after *limit* s at most."""
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
            poll.unregister(descriptor)
            waiting -= 1


def _look_for_ends(handles: Sequence[Handle], deadline: float) -> None:
    """Wait without pidfds: look at the processes again and again."""
    while not all(handle.has_ended() for handle in handles):
        if monotonic() >= deadline:
            return
        sleep(_LOOK)
