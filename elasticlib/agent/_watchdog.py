"""
The watchdog that an agent runs for its workers, when its environment says so.

Rules of this file: the pipe is in a folder of its own unless the user named one; what expired is known before the
worker is killed for it, so that no report can come without it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticlib import records
from elasticlib.errors import ConfigError, ProcessFailure

if TYPE_CHECKING:
    from elasticlib.timer import FileTimerRequest, FileTimerServer

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"


class Watchdog:
    """
    The timers of one agent's workers; *environment* is the agent's own.

    Without ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` it does nothing.
    """

    def __init__(self, environment: Mapping[str, str], run_id: str, sink: records.Sink) -> None:
        self._wanted = environment.get(ENABLE) == "1"
        self._asked = environment.get(FILE)
        self._path = self._asked or ""
        self._run_id = run_id
        self._sink = sink
        self._server: FileTimerServer | None = None
        self._folder: str | None = None
        self._expired: dict[int, str] = {}
        """The timer for which a process was killed."""

    def start(self) -> dict[str, str]:
        """Have it run from now on; the variables by which workers find it. Raises `ConfigError` for a bad path."""
        if not self._wanted:
            return {}
        if self._server is None:
            from elasticlib.timer import FileTimerServer  # only here: most launches have no watchdog

            if self._asked is None or _is_read(self._asked):
                # No path, or one that a launcher above this one, which set the variables too, gave to its own workers.
                self._folder = self._folder or tempfile.mkdtemp(prefix="elasticlib_")  # for this user alone
                self._asked, self._path = None, os.path.join(self._folder, "timers")
            try:
                self._server = FileTimerServer(self._path, self._run_id, log_event=self._tell)
            except ConfigError as error:
                if self._path != self._asked:
                    raise
                raise ConfigError(
                    f"{FILE}={self._path!r} cannot become a named pipe: {error.__cause__}; give another path, or none"
                ) from error
            self._server.start()
        return {FILE: self._path}

    def stop(self) -> None:
        """End it and remove the pipe; it may be started again."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def last_progress(self) -> int | None:
        """When it was last seen at work, in seconds since the epoch; None while it does not run."""
        return None if self._server is None else self._server.get_last_progress_time()

    def explain(self, failure: ProcessFailure) -> None:
        """Say which timer was the end of this worker, if one was."""
        scope = self._expired.get(failure.pid)
        if scope is not None and failure.exitcode < 0 and not failure.exception_type:
            failure.message = f"timer {scope!r} expired: the watchdog sent {failure.signal_name()} to PID {failure.pid}"
            failure.hint = (
                "the worker did not leave the block of that timer in time: it hangs, or the time is too short"
            )

    def _tell(self, event: str, timer: FileTimerRequest | None) -> None:
        if timer is None:
            self._sink(records.WatchdogReported(event))
            return
        if timer.signal > 0:
            self._expired[timer.worker_pid] = timer.scope_id
        self._sink(
            records.WatchdogReported(event, timer.worker_pid, timer.scope_id, timer.expiration_time, int(timer.signal))
        )


def _is_read(path: str) -> bool:
    """Whether somebody reads from the named pipe *path* now."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
