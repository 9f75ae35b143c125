"""
Timers of processes, which are held so that a number which the kernel gives away again never hits another one.

Rules of this file: only what was alive when its timer began is signalled, and never this process, nor a group, nor
init: whoever may write to a timer server must not end its launcher with it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
from collections.abc import Collection, Iterable
from typing import Generic

from elasticlib._wire import room_for, wait_readable
from elasticlib.timer._timer_table import R, TimerTable

_log = logging.getLogger("elasticlib")


class ProcessTimers(Generic[R]):
    """What timer servers know of their processes; not for use by two threads at once."""

    def __init__(self) -> None:
        self._timer_table: TimerTable[R] = TimerTable()
        self._handles: dict[int, int | None] = {}
        """Process descriptors; None where the kernel gave none, and the process was there: it cannot be signalled."""
        self._refused: set[int] = set()
        """Processes that could not be signalled, which has been said."""

    def register_timers(self, timer_requests: Iterable[R]) -> None:
        """Begin timers, and end those whose requests have a negative deadline."""
        requests = list(timer_requests)
        self._timer_table.register(requests)
        for request in requests:
            if request.expiration_time >= 0:
                self._hold(request.worker_id)
        self._hold_only(self._timer_table.workers())

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget all timers of these processes."""
        self._timer_table.clear(worker_ids)
        self._hold_only(self._timer_table.workers())

    def get_expired_timers(self, deadline: float) -> dict[int, list[R]]:
        """By process id, the timers that expire at *deadline* (seconds since the epoch) or earlier."""
        return self._timer_table.expired(deadline)

    def _hold(self, pid: int) -> None:
        """Hold the process that now has the number *pid*, if there is one."""
        if pid in self._handles or pid <= 1:
            return
        try:
            with room_for(1):
                self._handles[pid] = os.pidfd_open(pid)
        except OSError as error:
            if error.errno != errno.ESRCH:
                self._handles[pid] = None

    def _has_ended(self, pid: int) -> bool:
        if (handle := self._handles.get(pid)) is not None:
            return bool(wait_readable([handle], 0))
        return pid not in self._handles or not is_running(pid)

    def _kill(self, pid: int, signum: int) -> bool:
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

    def _hold_only(self, pids: Collection[int]) -> None:
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
