"""
The worker's side of timers over a named pipe: one JSON line for each request, as torch's servers read it.

Rules of this file: a line is written at once or not at all, for all workers share the pipe; nothing waits for ever
for a server that is not there. (torch: ``torch.distributed.elastic.timer.file_based_local_timer``)
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal as _signal
import stat
import time
from typing import ClassVar

from attrs import define

from elasticlib.errors import TimerError, TimerServerError
from elasticlib.timer._requests import TimerClient
from elasticlib.timer._timer_table import TimerRequest

VERSION = 1
_TRIES = 10
_PAUSE = 0.1
"""Seconds between two tries to find the server."""


@define(init=False, unsafe_hash=True, repr=False)
class FileTimerRequest(TimerRequest):
    """A request as it goes through the pipe; *signal* is what the worker is to be killed with, 0 for nothing."""

    version: ClassVar[int] = VERSION
    signal: int

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        self.__attrs_init__(worker_pid, scope_id, expiration_time, signal)

    @property
    def worker_pid(self) -> int:
        """The process whose timer it is."""
        return int(self.worker_id)

    def to_json(self) -> str:
        """The request as it is sent, without the end of the line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


class FileTimerClient(TimerClient):
    """
    Sends the timers of this process through the named pipe *file_path* to a `FileTimerServer`, torch's or ours.

    When a timer expires, the server sends *signal* to this process; 0 or less: it only reports. `acquire` and
    `release` raise `TimerServerError` (a ``BrokenPipeError``) when no server has the pipe open within a second,
    and `TimerError` (a ``RuntimeError``) for a scope whose request is longer than ``select.PIPE_BUF``.
    """

    def __init__(self, file_path: str | os.PathLike[str], signal: int = _signal.SIGKILL) -> None:
        self._file_path = os.fspath(file_path)
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Begin a timer of this process."""
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
                        f"no timer server reads {self._file_path!r} ({error}): start it before its clients, as "
                        "TORCHELASTIC_ENABLE_FILE_TIMER=1 does"
                    ) from error
            time.sleep(_PAUSE)  # the server may be about to start, or to read

    def _write(self, line: bytes) -> None:
        # To open it for writing, without waiting, fails as long as nobody reads.
        descriptor = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no named pipe")
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
