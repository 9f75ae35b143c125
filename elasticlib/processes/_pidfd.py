"""Handles of processes by pidfds, the kernel's own kind, and the check that the kernel has them."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from elasticlib.processes._refusals import Refusal


class Handle:
    """A process, held by a pidfd, which this object owns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended; -1 once closed."""
        return self._descriptor

    def inherited(self) -> tuple[int, ...]:
        """
        Return the descriptors that a process forked from this one needs to use this handle too.
        """
        return (self._descriptor,)

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return _is_readable(self._descriptor)

    def send(self, signum: int) -> None:
        """
        Signal the process.

        Raises `ProcessLookupError` if it is gone, `PermissionError` if this process may not
        signal it.
        """
        signal.pidfd_send_signal(self._descriptor, signum)

    def exitcode(self) -> int | None:
        """
        Return the exit status of a child, ``-n`` for signal ``n``.

        None while it runs, and once another caller has reaped it.
        """
        return exitcode_of(os.P_PIDFD, self._descriptor)

    def reap(self) -> None:
        """Take a child's exit status from the kernel, if it has ended and was not reaped yet."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Close the handle; may be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def exitcode_of(kind: int, number: int) -> int | None:
    """
    Return the exit status of a child without reaping it, as `Handle.exitcode`.

    *kind* and *number* are the arguments of `os.waitid`.
    """
    try:
        found = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        # Not a child of this process, or already reaped.
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _try() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        # Tried too, because a seccomp profile may refuse this call alone.
        signal.pidfd_send_signal(descriptor, 0)
    finally:
        os.close(descriptor)


pidfds = Refusal("pidfd_open, pidfd_send_signal", _try)
"""The kernel's refusal of pidfds, if it makes none here."""


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
