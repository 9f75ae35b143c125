"""The kernel's own handle of a process, the pidfd, and whether there are any here."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from elasticlib.processes._refusals import Refusal


class Handle:
    """A process, held by a pidfd, which is this object's own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """A descriptor that is readable when the process has ended; -1 once closed."""
        return self._descriptor

    def inherited(self) -> tuple[int, ...]:
        """The descriptors that a process forked from this one needs, to use this handle too."""
        return (self._descriptor,)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return _is_readable(self._descriptor)

    def send(self, signum: int) -> None:
        """Signal the process. Raises `ProcessLookupError` when it is gone, `PermissionError` when it may not be."""
        signal.pidfd_send_signal(self._descriptor, signum)

    def exitcode(self) -> int | None:
        """Of a child: its exit status, ``-n`` for signal ``n``; None while it runs, or once somebody has reaped it."""
        return exitcode_of(os.P_PIDFD, self._descriptor)

    def reap(self) -> None:
        """Of a child: take its exit status from the kernel, if it has ended and nobody else has done so."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Let go of it; may come twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def exitcode_of(kind: int, number: int) -> int | None:
    """See `Handle.exitcode`: of the child that this *number* of that *kind* stands for, which is left unreaped."""
    try:
        found = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        # It is no child of this process, or was reaped.
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _try() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0)
    finally:
        os.close(descriptor)


pidfds = Refusal("pidfd_open, pidfd_send_signal", _try)
"""Why there are none here."""


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
