"""
Base classes of timers, `expires`, and timers over a multiprocessing queue.

The latter are for workers that the caller starts itself and can give the queue. A server is a
thread that takes requests and ends the workers that are overdue.

Rules of this file: a deadline is wall-clock time, because both ends run on one machine, and torch's
protocol uses it. A timer is released however its block ends. The server sleeps until a request
comes or the next timer expires. It continues after any error of a subclass and any request of a
client. It never signals a process that reuses a worker's number. (torch:
``torch.distributed.elastic.timer.api``, ``...timer.local_timer``)
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
from elasticlib._rules import is_time
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
"""Minimum sleep of a server in seconds: without sleep it would occupy a CPU."""


class TimerClient(abc.ABC):
    """
    Interface through which a process sets and releases its timers.

    (torch: ``torch.distributed.elastic.timer.TimerClient``)
    """

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start the timer *scope_id*, which expires at *expiration_time* (Unix seconds)."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer *scope_id*."""


class RequestQueue(abc.ABC):
    """
    Queue from which a server gets the requests of clients.

    (torch: ``torch.distributed.elastic.timer.api.RequestQueue``)
    """

    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of waiting requests; until the next `get` it can only grow."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to *size* requests; wait for them at most *timeout* seconds in all."""

    def interrupt(self) -> None:  # noqa: B027 - torch's subclasses have none
        """Let a waiting `get` return at once. A queue that cannot delays its server's stop."""


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses in this process by default."""
    global _client
    _client = timer_client
    _log.debug("timers of this process go through %s", type(timer_client).__name__)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """
    Return a context manager (and decorator) that limits its block to *after* seconds.

    The server of *client* kills this process if the block takes longer. None means the client
    given to `configure`. *scope* names the timer; the default is the file and line of the caller.
    Raises `ConfigError` for an *after* that is not a number, and, on entry without a client,
    `TimerError` (a ``RuntimeError``). (torch: ``torch.distributed.elastic.timer.expires``, whose
    default scope always names a line of ``contextlib``)
    """
    if not is_deadline(after):
        raise ConfigError(f"after={shown(after)} must be a number of seconds")
    if scope is None:
        # Found here, because the context manager is entered from contextlib or a decorator.
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _countdown(after, scope, client)


@contextlib.contextmanager
def _countdown(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client if client is not None else _client
    if client is None:
        raise TimerError(
            "no timer client is configured: call timer.configure(...) first, or pass a client to expires()"
        )

    client.acquire(scope, wall_time() + after)
    try:
        yield
    except BaseException:
        try:
            client.release(scope)
        except Exception as error:
            # The caller must get the exception of the block, not this one.
            _log.warning("timer %r could not be released: %s: %s", scope, type(error).__name__, error)
        raise

    # Outside of the try: an error of this release is the caller's to handle.
    client.release(scope)


class TimerServer(abc.ABC):
    """
    Server that watches the timers of *request_queue* in a thread of this process.

    Subclasses store the timers and end the workers. *max_interval* is the maximum sleep of the
    thread in seconds; if `get_expired_timers` returns all timers, expiry is noticed at once.
    *daemon*: True if the program may exit while the thread runs. (torch:
    ``torch.distributed.elastic.timer.TimerServer``)
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
        """Store the timers of the requests; one with a negative deadline releases its timer."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Return the timers whose expiration time is *deadline* or earlier, by worker."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker; return False to be called again. After an error it counts as ended."""

    def start(self) -> None:
        """Start the thread, also again after a `stop`; it has no effect while the thread runs."""
        if self._thread is not None:
            _log.warning("%s is already running: start() has no effect", type(self).__name__)
            return
        # Each thread has its own event, so that one that outlives the timeout of `stop` still ends.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._stopping,), name="elasticlib-timers", daemon=self._daemon
        )
        start_thread(self._thread)

    def stop(self) -> None:
        """Stop the thread and wait for its end, for at most *max_interval* seconds."""
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
                # Most likely the next check will fail too.
                stopping.wait(min(1.0, self._max_interval))

    def _turn(self) -> None:
        running: list[TimerRequest] = []
        for timers in self.get_expired_timers(math.inf).values():
            running += timers
        wait = poll_timeout(running, wall_time(), self._max_interval)

        # At least one, or the queue would not wait for the first.
        requests = self._request_queue.get(max(1, self._request_queue.size()), wait)
        valid = [request for request in requests if is_deadline(getattr(request, "expiration_time", None))]
        if len(valid) < len(requests):
            self._refuse()
        self.register_timers(valid)
        expired = self.get_expired_timers(wall_time())
        self.clear_timers({worker for worker, timers in expired.items() if self._is_reaped(worker, timers)})

    def _refuse(self) -> None:
        self._refusals, text = self._refusals.refuse("request", "the message is not a timer request", monotonic())
        if text is not None:
            _log.warning("%s: %s", type(self).__name__, text)

    def _is_reaped(self, worker: Any, timers: Sequence[TimerRequest]) -> bool:
        scopes = ", ".join(timer.scope_id for timer in timers)
        _log.warning("worker %s is killed, because its timers expired: %s", worker, scopes)
        try:
            return self._reap_worker(worker)
        except Exception:
            _log.exception("worker %s could not be killed; its timers are dropped", worker)
            return True


def is_running(pid: int) -> bool:
    """
    Return whether a process *pid* of any user exists.

    It does not use ``/proc``, which may be missing, or hide the process.
    """
    if pid <= 0:
        return False

    try:
        os.kill(pid, 0)
    # The process belongs to another user.
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False

    return True


class ProcessTimers(Generic[R]):
    """
    Timers of processes, for use by one thread.

    It holds a handle of each process, because the kernel reuses process ids. It only signals
    processes that were alive when their timer started. It never signals this process, a group or
    init: a client of a timer server must not be able to end the launcher.
    """

    def __init__(self) -> None:
        self._timer_table: TimerTable[R] = TimerTable()
        self._handles: dict[int, processes.Handle | None] = {}
        """Handles by process id; None: the process existed but cannot be signalled."""
        self._refused: set[int] = set()
        """Processes that could not be signalled, after this has been logged."""

    def register_timers(self, timer_requests: Iterable[R]) -> None:
        """Start timers, and end those whose requests have a negative deadline."""
        requests = list(timer_requests)
        self._timer_table.register(requests)
        for request in requests:
            if request.expiration_time >= 0:
                self._hold(request.worker_id)
        self._hold_only(self._timer_table.workers())

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Remove all timers of these processes."""
        self._timer_table.clear(worker_ids)
        self._hold_only(self._timer_table.workers())

    def get_expired_timers(self, deadline: float) -> dict[int, list[R]]:
        """Return the timers that expire at *deadline* (Unix seconds) or earlier, by process id."""
        return self._timer_table.expired(deadline)

    def _hold(self, pid: int) -> None:
        """Get a handle of the process that now has the number *pid*, if it exists."""
        # 0 and below are groups and 1 is init: these are never signalled.
        if pid in self._handles or pid <= 1:
            return

        try:
            # The program's own files may fill its soft limit.
            with room_for_descriptors(1):
                self._handles[pid] = processes.handle_of(pid)
        except OSError as error:
            # The process exists, but the kernel gives no descriptor of it.
            if error.errno != errno.ESRCH:
                self._handles[pid] = None

    def _has_ended(self, pid: int) -> bool:
        if (handle := self._handles.get(pid)) is not None:
            return handle.has_ended()
        # Without a descriptor, only the number can be checked.
        return pid not in self._handles or not is_running(pid)

    def _kill(self, pid: int, signum: int) -> bool:
        """Send *signum* to process *pid*; return False if it exists and could not be signalled."""
        # A request may name any process, including the server's own.
        if pid == os.getpid():
            _log.error("a timer of process %d expired; the timer server runs in this process and does not kill it", pid)
            return True

        try:
            if pid not in self._handles:
                # No process had this number when its timer began.
                raise ProcessLookupError
            # Another process may have the number by now.
            if (handle := self._handles[pid]) is None:
                raise OSError(errno.EBADF, "no handle of the process could be opened when the timer began")
            handle.send(signum)
        except ProcessLookupError:
            _log.info("process %d, whose timer expired, has already ended", pid)
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
    """Return *value* in seconds, at least the minimum. Raises `ConfigError` if it is invalid."""
    if not is_time(value):
        raise ConfigError(f"max_interval={value!r} must be a finite number of seconds, 0 or more")
    return max(value, _SHORTEST)


class LocalTimerClient(TimerClient):
    """Client that sends the timers of this process through *mp_queue* to a `LocalTimerServer`."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """End a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Request queue over a ``multiprocessing.Queue``."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._interrupt)

    def size(self) -> int:
        """Return the number of waiting requests."""
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to *size* requests that arrive within *timeout* seconds."""
        deadline = monotonic() + timeout
        found: list[TimerRequest] = []
        while len(found) < size and self._has_request(max(0.0, deadline - monotonic())):
            try:
                found.append(self._mp_queue.get(timeout=max(0.0, deadline - monotonic())))
            # The time is over, or another reader has taken the request.
            except queue.Empty:
                break
        return found

    def interrupt(self) -> None:
        """Let a waiting `get` return at once."""
        os.eventfd_write(self._interrupt, 1)

    def _has_request(self, timeout: float) -> bool:
        # Other kinds of queues (a manager's, a program's own) have no pipe, only a blocking get.
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
    Server that sends SIGKILL to each worker that did not release a timer in time.

    Its clients are `LocalTimerClient` s. A worker that has already ended counts as killed. (torch:
    ``torch.distributed.elastic.timer.LocalTimerServer``)
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        ProcessTimers.__init__(self)
        TimerServer.__init__(self, MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        return self._kill(worker_id, signal.SIGKILL)
