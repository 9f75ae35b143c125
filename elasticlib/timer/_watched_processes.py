"""
The processes that have timers, held so that a number which the kernel gives away again never hits another one.

Rules of this file: only what was alive when its timer began is signalled, and never this process, nor a group, nor
init: whoever may write to a timer server must not end its launcher with it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
from collections.abc import Collection

from elasticlib._wire import room_for

_log = logging.getLogger("elasticlib")


class WatchedProcesses:
    """Processes by id; not for use by two threads at once."""

    def __init__(self) -> None:
        self._handles: dict[int, int | None] = {}
        """Process descriptors; None where the kernel gave none, and the process was there: it cannot be signalled."""
        self._refused: set[int] = set()
        """Processes that could not be signalled, which has been said."""

    def watch(self, pid: int) -> None:
        """Hold the process that now has the number *pid*, if there is one."""
        if pid in self._handles or pid <= 1:
            return
        try:
            with room_for(1):
                self._handles[pid] = os.pidfd_open(pid)
        except OSError as error:
            if error.errno != errno.ESRCH:
                self._handles[pid] = None

    def gone(self, pids: Collection[int]) -> set[int]:
        """Those of *pids* whose processes have ended."""
        found = set()
        for pid in pids:
            handle = self._handles.get(pid)
            if handle is None:
                ended = pid not in self._handles or not is_running(pid)
            else:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                ended = bool(poll.poll(0))
            if ended:
                found.add(pid)
        return found

    def kill(self, pid: int, signum: int) -> bool:
        """Send *signum*; whether that is settled: it was sent, or there is no such process to send it to."""
        if pid == os.getpid():
            _log.error("a timer of the timer server's own process %d expired; it does not end itself", pid)
            return True
        if pid not in self._handles:
            _log.info("process %d, whose timer expired, had ended", pid)
            return True
        handle = self._handles[pid]
        try:
            if handle is None:  # its number may be another's by now
                raise OSError(errno.EBADF, "no descriptor could be had of it when its timer began")
            signal.pidfd_send_signal(handle, signum)
        except ProcessLookupError:
            _log.info("process %d, whose timer expired, had ended", pid)
        except OSError as error:
            if pid not in self._refused:
                self._refused.add(pid)
                _log.error("process %d, whose timer expired, cannot be killed: %s", pid, error)
            return False
        return True

    def keep_only(self, pids: Collection[int]) -> None:
        """Let go of all others."""
        self._refused.intersection_update(pids)
        for pid in self._handles.keys() - set(pids):
            handle = self._handles.pop(pid)
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)


def is_running(pid: int) -> bool:
    """Whether there is a process with this number, whoever owns it."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
