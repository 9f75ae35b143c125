"""
The server of any kind of timer: a thread that takes requests and reaps the workers that are overdue.

Rules of this file: it sleeps until a request comes or the next timer is over, and whatever a subclass raises or a
client asks for, it goes on watching.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from elasticlib._clock import monotonic
from elasticlib._programs import start_thread
from elasticlib._untrusted import Refusals
from elasticlib.errors import ConfigError
from elasticlib.timer._requests import RequestQueue
from elasticlib.timer._timer_table import TimerRequest, is_deadline, patience

_log = logging.getLogger("elasticlib")
_SHORTEST = 0.001
"""Seconds: a server without any sleep would take a CPU for itself."""


class TimerServer(abc.ABC):
    """
    Watches the timers that come through *request_queue*, in a thread of this process.

    Subclasses keep the timers and know how to end a worker. *max_interval* is how long, in seconds, the thread may
    sleep; where all timers are told by `get_expired_timers`, expiry is noticed at once. *daemon* says whether the
    program may end while the thread runs. (torch: ``torch.distributed.elastic.timer.TimerServer``)
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        self._request_queue = request_queue
        self._max_interval = checked_interval(max_interval)
        self._daemon = daemon
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._refusals = Refusals()

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[Any]) -> None:
        """Take requests in; one with a negative deadline releases its timer."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the timers whose expiration time is *deadline* or earlier."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker; False to be called again later. A worker whose reaping raises counts as reaped."""

    def start(self) -> None:
        """Begin to watch, also once more after a `stop`; without effect while it watches."""
        if self._thread is not None:
            _log.warning("%s is at work already: start() has no effect", type(self).__name__)
            return
        # Each thread has an event of its own: one that outstayed the patience of `stop` still ends.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._stopping,), name="elasticlib-timers", daemon=self._daemon
        )
        start_thread(self._thread)

    def stop(self) -> None:
        """Cease to watch; returns when the thread has ended, and after *max_interval* seconds at the latest."""
        self._stopping.set()
        self._request_queue.interrupt()
        if self._thread is not None:
            self._thread.join(self._max_interval)
            self._thread = None

    def _watch(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                self._turn()
            except Exception:
                _log.exception("a check of %s failed", type(self).__name__)
                stopping.wait(min(1.0, self._max_interval))  # most likely the next one fails too

    def _turn(self) -> None:
        running = [timer for timers in self.get_expired_timers(math.inf).values() for timer in timers]
        wait = patience(running, time.time(), self._max_interval)
        asked = self._request_queue.get(max(1, self._request_queue.size()), wait)
        sound = [request for request in asked if is_deadline(getattr(request, "expiration_time", None))]
        if len(sound) < len(asked):
            self._refusals, said = self._refusals.refuse("request", "what came is no request of a timer", monotonic())
            if said is not None:
                _log.warning("%s: %s", type(self).__name__, said)
        self.register_timers(sound)
        reaped = {
            worker for worker, timers in self.get_expired_timers(time.time()).items() if self._is_reaped(worker, timers)
        }
        self.clear_timers(reaped)

    def _is_reaped(self, worker: Any, timers: Sequence[TimerRequest]) -> bool:
        scopes = ", ".join(timer.scope_id for timer in timers)
        _log.warning("worker %s did not leave %s in time and is ended", worker, scopes)
        try:
            return self._reap_worker(worker)
        except Exception:
            _log.exception("ending worker %s failed; its timers are dropped", worker)
            return True


def checked_interval(value: float) -> float:
    """*value*, if it is seconds, 0 for the shortest there is; raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"max_interval={value!r} must be a finite number of seconds, 0 or more")
    return max(value, _SHORTEST)
