"""
Timers over a multiprocessing queue, for workers that the caller starts itself and can give the queue.

Rules of this file: a worker is its process id. (torch: ``torch.distributed.elastic.timer.local_timer``)
"""

from __future__ import annotations

import os
import queue
import signal
import time
import weakref
from typing import Any

from elasticlib._wire import wait_readable
from elasticlib.timer._api import ProcessTimers, RequestQueue, TimerClient, TimerServer
from elasticlib.timer._timer_table import TimerRequest

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]


class LocalTimerClient(TimerClient):
    """Sends the timers of this process through *mp_queue* to a `LocalTimerServer` of the same machine."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Begin a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """End a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The requests that come through a ``multiprocessing.Queue``."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._interrupt)

    def size(self) -> int:
        """How many requests wait."""
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to *size* requests that come within *timeout* seconds."""
        deadline = time.monotonic() + timeout
        found: list[TimerRequest] = []
        while len(found) < size and self._comes(max(0.0, deadline - time.monotonic())):
            try:
                found.append(self._mp_queue.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return found

    def interrupt(self) -> None:
        """Have a `get` that waits return at once."""
        os.eventfd_write(self._interrupt, 1)

    def _comes(self, timeout: float) -> bool:
        # Queues of other kinds (a manager's, a program's own) have no pipe to wait for, only a get that blocks.
        pipe = getattr(self._mp_queue, "_reader", None)
        if pipe is None:
            return True
        ready = wait_readable([pipe, self._interrupt], timeout)
        if self._interrupt in ready:
            os.eventfd_read(self._interrupt)  # it was for this wait alone: the server may be started again
        return pipe.fileno() in ready


class LocalTimerServer(ProcessTimers[TimerRequest], TimerServer):
    """
    Kills, with SIGKILL, each worker that did not release a timer in time. Its clients are `LocalTimerClient` s.

    A worker that has ended by itself counts as killed. (torch: ``torch.distributed.elastic.timer.LocalTimerServer``)
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        ProcessTimers.__init__(self)
        TimerServer.__init__(self, MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        return self._kill(worker_id, signal.SIGKILL)
