"""
Timers over a named pipe.

Each request is a JSON line in the format of torch's clients and servers. The client runs in a
worker; the server is the watchdog of one launcher's workers.

Rules of this file: a line is written in one piece or not at all, because all workers share the
pipe. Waiting for a missing server has a time limit. Only this user can open the pipe. Requests are
checked; an invalid one affects no other timer. An expired timer ends only the process that set it.
(torch: ``torch.distributed.elastic.timer.file_based_local_timer``)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal as _signal
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import ClassVar, TypeGuard

from attrs import define

from elasticlib._clock import monotonic, sleep, wall_time
from elasticlib._rules import is_number
from elasticlib._untrusted import Refusals, line as escaped, parse, shown
from elasticlib.errors import ConfigError, TimerError, TimerServerError
from elasticlib.processes import start_thread, wait_readable
from elasticlib.timer._api import ProcessTimers, TimerClient, checked_interval, is_running
from elasticlib.timer._timer_table import TimerRequest, is_deadline, poll_timeout

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

_log = logging.getLogger("elasticlib")
VERSION = 1
# With the pauses about a second: the server may start at the same time as its clients.
_TRIES = 10
_PAUSE = 0.1
"""Seconds between two tries to find the server."""
_PIECE = 65536
"""Maximum bytes to read before deadlines are checked again: the kernel's buffer of a pipe."""
# Clients write at most PIPE_BUF bytes at once, which is much less.
_LONGEST_LINE = 65536


@define(init=False, unsafe_hash=True, repr=False)
class FileTimerRequest(TimerRequest):
    """Request as sent through the pipe; *signal* kills the worker, 0 sends none."""

    version: ClassVar[int] = VERSION
    signal: int

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        self.__attrs_init__(worker_pid, scope_id, expiration_time, signal)

    @property
    def worker_pid(self) -> int:
        """Process id of the timer's owner."""
        return int(self.worker_id)

    def to_json(self) -> str:
        """Return the request as JSON, without the line end."""
        return dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


LogEvent = Callable[[str, FileTimerRequest | None], None]
"""
Function that gets an event's name and its timer.

The names are ``watchdog started``, ``watchdog stopped``, ``timer expired`` and ``kill worker
process``.
"""


class FileTimerClient(TimerClient):
    """
    Client that sends the timers of this process to a `FileTimerServer`, torch's or this package's.

    *file_path* is the server's named pipe. When a timer expires, the server sends *signal* to this
    process; 0 or less: it only reports the timer. `acquire` and `release` raise `TimerServerError`
    (a ``BrokenPipeError``) if no server has opened the pipe within a second. They raise
    `TimerError` (a ``RuntimeError``) if the request is longer than ``select.PIPE_BUF``.
    """

    def __init__(self, file_path: str | os.PathLike[str], signal: int = _signal.SIGKILL) -> None:
        self._file_path = os.fspath(file_path)
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer of this process."""
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """End a timer of this process."""
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = f"{request.to_json()}\n".encode()
        if len(line) > select.PIPE_BUF:
            raise TimerError(
                f"the request for timer {request.scope_id[:80]!r}... has {len(line)} bytes, but a pipe takes only "
                f"{select.PIPE_BUF} at once: give the scope a shorter name"
            )

        for left in range(_TRIES - 1, -1, -1):
            try:
                return self._write(line)
            except OSError as error:
                if not left:
                    raise TimerServerError(
                        f"no timer server reads {self._file_path!r} ({error}): start the server before its clients, or "
                        "set TORCHELASTIC_ENABLE_FILE_TIMER=1 to start it with the job"
                    ) from error

            # The server may be about to start, or to read.
            sleep(_PAUSE)

    def _write(self, line: bytes) -> None:
        # Opening it for writing without waiting fails as long as no process reads.
        descriptor = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Any other file would take the request, which no server reads.
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a named pipe")
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


class FileTimerServer(ProcessTimers[FileTimerRequest]):
    """
    Server that makes the named pipe *file_path* and watches the timers that come through it.

    It replaces an existing file. Its clients are `FileTimerClient` s, torch's or this package's.
    When a timer expires, its process gets the signal that the client chose; of several timers, the
    earliest with a signal counts. Differs from torch's server:

    * it never ends its own process;
    * it acts when the timer expires, not up to *max_interval* seconds later;
    * it never signals a process that reuses the number of another one.

    *max_interval* is the maximum sleep of its thread in seconds. The thread calls *log_event* with
    the name of each event and its timer. Raises `ConfigError` if the pipe cannot be made. (torch:
    ``torch.distributed.elastic.timer.FileTimerServer``)
    """

    def __init__(
        self,
        file_path: str | os.PathLike[str],
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: LogEvent | None = None,
    ) -> None:
        super().__init__()
        self._file_path = os.fspath(file_path)
        self._run_id = run_id
        self._max_interval = checked_interval(max_interval)
        self._daemon = daemon
        self._log_event = log_event
        self._reported: set[FileTimerRequest] = set()
        """Expired timers that were reported, and whose process has not been signalled yet."""
        self._rest = b""
        self._refusals = Refusals()
        self._thread: threading.Thread | None = None
        self._stopping = self._once = False
        self._progress = wall_time()
        self._open()

    def _open(self) -> None:
        try:
            # A link that leads nowhere is in the way, too.
            if os.path.lexists(self._file_path):
                os.unlink(self._file_path)
            os.mkfifo(self._file_path, 0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"file_path={self._file_path!r} cannot be created as a named pipe: {error}; give another path"
            ) from error

        # This process opens it for writing too: without a client, reads would report its end.
        self._pipe = -1
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self) -> None:
        """
        Start the thread that serves clients; it has no effect while the thread runs.

        After a `stop` it makes the pipe again. Raises `TimerError` if the former thread has not
        ended.
        """
        if self._thread is not None and self._stopping:
            raise TimerError(
                "this timer server cannot start again, because its thread has not ended: create a new server"
            )

        if self._thread is not None:
            _log.warning("the timer server of %s is already running: start() has no effect", self._file_path)
            return

        # `stop` has removed the pipe.
        if self._wake < 0:
            self._open()
        self._stopping = self._once = False
        self._rest = b""
        self._pipe = os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._progress = wall_time()
        self._thread = threading.Thread(target=self._watch, name="elasticlib-watchdog", daemon=self._daemon)
        start_thread(self._thread)
        self._call_log_event("watchdog started")

    def stop(self) -> None:
        """Stop the thread and remove the pipe; it may be called twice."""
        if self._wake < 0:
            return
        self._stopping = True
        self._end(self._max_interval)
        self._call_log_event("watchdog stopped")

    def run_once(self) -> None:
        """Handle all requests that have arrived, then stop the thread and remove the pipe."""
        if self._wake < 0:
            return
        self._once = True
        self._end(None)

    def get_last_progress_time(self) -> int:
        """Return the Unix time of the thread's last progress; now if no thread runs."""
        return int(self._progress if self._thread is not None else wall_time())

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether the process *pid* exists."""
        return is_running(pid)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove all timers of these processes, and of those that have ended."""
        super().clear_timers(worker_pids | set(filter(self._has_ended, self._timer_table.workers())))

    # The thread.

    def _watch(self) -> None:
        while not self._stopping:
            # Read first: if `run_once` comes in this turn, the next turn reads the pipe to its end.
            once = self._once
            try:
                # The wake-up event is never reset, so after `run_once` or `stop` no wait is long.
                timeout = poll_timeout(self._timer_table, wall_time(), self._max_interval)
                wait_readable([self._pipe, self._wake], timeout)
                if not self._stopping:
                    self._turn(to_the_end=once)
            except Exception:
                _log.exception("a check of the watchdog failed")
                # Most likely the next check will fail too.
                wait_readable([self._wake], min(1.0, self._max_interval))

            if once:
                return
            self._progress = wall_time()

    def _turn(self, *, to_the_end: bool) -> None:
        # Otherwise one piece, so that a flood of requests cannot delay the timers.
        while self._read() and to_the_end:
            pass
        expired = self.get_expired_timers(wall_time())
        news = {
            pid: [timer.to_json() for timer in timers if timer not in self._reported] for pid, timers in expired.items()
        }
        log_debug_info_for_expired_timers(self._run_id, {pid: timers for pid, timers in news.items() if timers})
        self.clear_timers({pid for pid, timers in expired.items() if self._settle(pid, timers)})
        self._reported.intersection_update(self._timer_table)

    def _settle(self, pid: int, timers: list[FileTimerRequest]) -> bool:
        """Act on the expired timers of a process; return whether all its timers can be removed."""
        deadly = None
        for timer in timers:
            if timer not in self._reported:
                self._reported.add(timer)
                self._call_log_event("timer expired", timer)
            # Of several timers, the earliest with a signal counts.
            if timer.signal > 0:
                deadly = timer
                break

        if deadly is None:
            # Remove these timers, but not the others of the process, which continues.
            self._timer_table.register(FileTimerRequest(pid, timer.scope_id, -1) for timer in timers)
            return False

        if not self._kill(pid, deadly.signal):
            return False

        _log.info("the timer %s of process %d expired: the process got signal %d", deadly.scope_id, pid, deadly.signal)
        self._call_log_event("kill worker process", deadly)
        return True

    def _read(self) -> bool:
        """Read and register requests from the pipe, up to a limit; return whether it had data."""
        try:
            piece = os.read(self._pipe, _PIECE)
        except BlockingIOError:
            return False

        # A piece may end within a line.
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._refuse(f"{len(self._rest)} bytes without a line end: left out")
            self._rest = b""

        requests = []
        for line in lines:
            try:
                requests.append(_read_request(line))
            except ValueError as error:
                self._refuse(f"{line[:80]!r}, which is not a request: {error}")

        self.register_timers(requests)
        return True

    def _refuse(self, why: str) -> None:
        self._refusals, line = self._refusals.refuse("request", why, monotonic())
        if line is not None:
            _log.warning("the timer pipe %s holds %s", self._file_path, line)

    # Start and end.

    def _end(self, timeout: float | None) -> None:
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("the watchdog's thread did not end within %s s", timeout)
                # The thread may still use the descriptors.
                return
            self._thread = None

        with contextlib.suppress(OSError):
            os.unlink(self._file_path)
        if self._pipe >= 0:
            os.close(self._pipe)
        os.close(self._wake)
        self._pipe = self._wake = -1
        self._hold_only(())

    def _call_log_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._log_event is None:
            return
        try:
            # A caller's function must not end the thread that watches the timers.
            self._log_event(name, request)
        except Exception:
            _log.exception("log_event failed for %r", name)


def _read_request(line: bytes) -> FileTimerRequest:
    body = parse(line, constants=True)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if body.get("version") != VERSION:
        raise ValueError(f"its version is {shown(body.get('version'))}, but this server reads only version {VERSION}")

    scope = body.get("scope_id")
    pid, deadline, signum = body.get("pid"), body.get("expiration_time"), body.get("signal")
    if not _is_pid(pid):
        raise ValueError("its field 'pid' is not a process id")
    if not isinstance(scope, str):
        raise ValueError("its field 'scope_id' is not a string")
    if not is_number(deadline) or not is_deadline(deadline):
        raise ValueError("its field 'expiration_time' is not a number, or is too large")
    if not _is_signal(signum):
        raise ValueError("its field 'signal' is not the number of a signal of this system")

    return FileTimerRequest(pid, escaped(scope), deadline, signum)


def _is_pid(value: object) -> TypeGuard[int]:
    return type(value) is int and 1 < value < 2**31


def _is_signal(value: object) -> TypeGuard[int]:
    # For 0 and below, no signal is sent.
    return type(value) is int and (value <= 0 or value in _signal.valid_signals())


def log_debug_info_for_expired_timers(run_id: str, expired_timers: Mapping[int, Sequence[str]]) -> None:
    """
    Log the expired timers of the job *run_id*, given as {process id: timers as text}, if any.

    (torch: ``torch.distributed.elastic.timer.debug_info_logging.log_debug_info_for_expired_timers``)
    """
    if expired_timers:
        _log.info("job %s: timers expired: %s", run_id, dict(expired_timers))
