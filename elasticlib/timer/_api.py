"""
What timers of any kind are made of: clients with `expires`, queues of requests, and the server; and those timers that
are just that, over a multiprocessing queue, for workers that the caller starts itself and can give the queue.

The server is a thread that takes requests and reaps the workers that are overdue.

Rules of this file: a deadline is wall-clock time, since both ends run on one machine and torch's ends say it so; a
timer is released however its block ends. The server sleeps until a request comes or the next timer is over, and
whatever a subclass raises or a client asks for, it goes on watching. Where a worker is a process, no other one is ever
hit that got its number. (torch: ``torch.distributed.elastic.timer.api``, ``...timer.local_timer``)
"""

from __future__ import annotations

import abc
import contextlib
import errno
import logging
import math
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from elasticlib import processes
from elasticlib._clock import monotonic, wall_time
from elasticlib._untrusted import Refusals, shown
from elasticlib.errors import ConfigError, TimerError
from elasticlib.processes import room_for_descriptors, start_thread, wait_readable
from elasticlib.timer._timer_table import R, TimerRequest, TimerTable, is_deadline, poll_timeout

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
__all__ += ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

_log = logging.getLogger("elasticlib")
_SHORTEST = 0.001
"""Seconds: a server without any sleep would take a CPU for itself."""


class TimerClient(abc.ABC):
    """Sets and releases the timers of this process. (torch: ``torch.distributed.elastic.timer.TimerClient``)"""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Begin the timer *scope_id*, which expires at *expiration_time* (seconds since the epoch)."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer *scope_id*."""


class RequestQueue(abc.ABC):
    """Where a server finds what clients asked for. (torch: ``torch.distributed.elastic.timer.api.RequestQueue``)"""

    @abc.abstractmethod
    def size(self) -> int:
        """How many requests wait; until the next `get` there may be more, never fewer."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to *size* requests, waiting for them for at most *timeout* seconds in all."""

    def interrupt(self) -> None:  # noqa: B027 - torch's subclasses have none
        """Have the `get` that waits return at once. A queue that cannot do so makes its server slow to stop."""


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Have `expires` use *timer_client* in this process, wherever it is not given another one."""
    global _client
    _client = timer_client
    _log.debug("timers of this process go through %s", type(timer_client).__name__)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """
    A context manager, and decorator, whose block this process must leave within *after* seconds, or be killed.

    Who kills it is the server that *client* speaks to; None takes what was given to `configure`. *scope* names the
    timer, by default by the place in the source that called this. Raises `TimerError` (a ``RuntimeError``) on entry
    when there is no client, `ConfigError` for an *after* that is no number. (torch:
    ``torch.distributed.elastic.timer.expires``; there, the default scope always names a line of ``contextlib``)
    """
    if not is_deadline(after):
        raise ConfigError(f"after={shown(after)} must be a number of seconds")
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _countdown(after, scope, client)


@contextlib.contextmanager
def _countdown(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client if client is not None else _client
    if client is None:
        raise TimerError("no timer client is configured: call timer.configure(...) first, or give expires a client")
    client.acquire(scope, wall_time() + after)
    try:
        yield
    except BaseException:
        try:
            client.release(scope)
        except Exception as error:
            # What the block raised is what its caller must hear of.
            _log.warning("timer %r could not be released: %s: %s", scope, type(error).__name__, error)
        raise
    client.release(scope)


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
        # Each thread has an event of its own: one that outstayed the time limit of `stop` still ends.
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
                # Most likely the next check fails too.
                stopping.wait(min(1.0, self._max_interval))

    def _turn(self) -> None:
        running: list[TimerRequest] = []
        for timers in self.get_expired_timers(math.inf).values():
            running += timers
        wait = poll_timeout(running, wall_time(), self._max_interval)
        requests = self._request_queue.get(max(1, self._request_queue.size()), wait)
        valid = [request for request in requests if is_deadline(getattr(request, "expiration_time", None))]
        if len(valid) < len(requests):
            self._refuse()
        self.register_timers(valid)
        expired = self.get_expired_timers(wall_time())
        self.clear_timers({worker for worker, timers in expired.items() if self._is_reaped(worker, timers)})

    def _refuse(self) -> None:
        self._refusals, text = self._refusals.refuse("request", "what came is no request of a timer", monotonic())
        if text is not None:
            _log.warning("%s: %s", type(self).__name__, text)

    def _is_reaped(self, worker: Any, timers: Sequence[TimerRequest]) -> bool:
        scopes = ", ".join(timer.scope_id for timer in timers)
        _log.warning("worker %s did not leave %s in time and is ended", worker, scopes)
        try:
            return self._reap_worker(worker)
        except Exception:
            _log.exception("ending worker %s failed; its timers are dropped", worker)
            return True


def is_running(pid: int) -> bool:
    """Whether there is a process with this number, whoever owns it: ``/proc`` may be missing, or hide it."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


class ProcessTimers(Generic[R]):
    """
    The timers of processes, for one thread; a process is held, since the kernel gives its number away again.

    Only what was alive when its timer began is signalled, and never this process, nor a group, nor init: whoever may
    write to a timer server must not end its launcher with it.
    """

    def __init__(self) -> None:
        self._timer_table: TimerTable[R] = TimerTable()
        self._handles: dict[int, processes.Handle | None] = {}
        """By process id; None where the kernel gave none, and the process was there: it cannot be signalled."""
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
        # 0 and below are groups and 1 is init: these are never signalled.
        if pid in self._handles or pid <= 1:
            return
        try:
            with room_for_descriptors(1):
                self._handles[pid] = processes.handle_of(pid)
        except OSError as error:
            # The process is there, but the kernel gives no descriptor of it.
            if error.errno != errno.ESRCH:
                self._handles[pid] = None

    def _has_ended(self, pid: int) -> bool:
        if (handle := self._handles.get(pid)) is not None:
            return handle.has_ended()
        # Without a descriptor only the number can be looked for.
        return pid not in self._handles or not is_running(pid)

    def _kill(self, pid: int, signum: int) -> bool:
        """Send *signum*; whether that is settled: it was sent, or there is no such process to send it to."""
        # A request may name any process, the server's own too.
        if pid == os.getpid():
            _log.error("a timer of the timer server's own process %d expired; it does not end itself", pid)
            return True
        try:
            if pid not in self._handles:
                raise ProcessLookupError
            # Another process may have the number by now.
            if (handle := self._handles[pid]) is None:
                raise OSError(errno.EBADF, "no descriptor could be had of it when its timer began")
            handle.send(signum)
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
                    handle.close()


def checked_interval(value: float) -> float:
    """*value*, if it is seconds, 0 for the shortest there is; raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"max_interval={value!r} must be a finite number of seconds, 0 or more")
    return max(value, _SHORTEST)


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
        deadline = monotonic() + timeout
        found: list[TimerRequest] = []
        while len(found) < size and self._comes(max(0.0, deadline - monotonic())):
            try:
                found.append(self._mp_queue.get(timeout=max(0.0, deadline - monotonic())))
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
            # The interrupt is for this wait alone, since the server may be started again.
            os.eventfd_read(self._interrupt)
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
