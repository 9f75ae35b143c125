"""
An agent's extra services: watchdog, health check, check for uninterruptible sleep, debug sockets.

Rules of this file: each service is off unless asked for, and then costs nothing. A fault of a
service cannot end the job: a port that is in use gives a warning. A worker counts as asleep only if
it was in state D at every check: the time restarts when it was not. The watchdog's pipe is in its
own folder unless the user named a path. The expired timer is known before the worker is killed, so
each report has it. Socket paths are short, because an address has at most 108 bytes. All sockets
are removed when the run ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticlib import records
from elasticlib._clock import Clock, monotonic, wall_time
from elasticlib._times import soonest
from elasticlib.agent._checks import as_seconds
from elasticlib.agent._health import HealthCheckServer, create_healthcheck_server
from elasticlib.errors import ConfigError, ProcessFailure
from elasticlib.processes import make_temporary_folder
from elasticlib.utils import is_uninterruptible_state, read_proc_state
from elasticlib.workers.child import SERVER_VARIABLE, StartSpec

if TYPE_CHECKING:
    from elasticlib.timer import FileTimerRequest, FileTimerServer

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
HEALTH_CHECK_TIMEOUT = 60
"""Seconds without progress after which the health check calls an agent dead."""
_HEALTH_INTERVAL = 10.0
"""Maximum seconds between two turns of the agent's loop while a health check runs."""
_LONGEST = 107
_RANK_DIGITS = 6


class Watch:
    """
    Services for the workers of one agent, chosen by *environment* and the arguments.

    *health_check_server* is one that the caller starts. It takes precedence over the variable, and
    is stopped with the other services. *read_state* and *clock* are for tests.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        run_id: str,
        sink: records.Sink,
        *,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        read_state: Callable[[int], str | None] = read_proc_state,
        clock: Clock = monotonic,
    ) -> None:
        self._sink = sink
        self._watchdog = Watchdog(environment, run_id, sink)
        self._port = environment.get(HEALTH_CHECK_PORT) if health_check_server is None else None
        self._health = health_check_server
        given = uninterruptible_state_timeout
        text = environment.get(UNINTERRUPTIBLE_STATE_TIMEOUT) if given is None else None
        self._allowed = max(0.0, as_seconds(text or given or 0) or 0.0)
        """Seconds that a worker may be in uninterruptible sleep; 0: no limit."""
        self._words = environment.get(ENABLE, ""), text
        """Raw values of the variables for watchdog and uninterruptible sleep, valid or not."""
        self._read_state = read_state
        self._clock = clock
        self._asleep: dict[int, float] = {}
        """Start of each worker's sleep, by process id."""
        self._stuck: dict[int, float] = {}
        """Seconds of sleep of those that have exceeded the limit, by process id."""
        self._turned: float | None = None
        """Unix time of the last check of running workers; None while none run."""

    def open(self) -> None:
        """
        Start the watchdog, and the health check if the environment names a port.

        Raises `ConfigError` for a path at which the watchdog cannot make its pipe.
        """
        enable, seconds = self._words
        if enable not in ("", "0", "1"):
            self._sink(records.VariableIgnored(ENABLE, enable, "1 turns it on, 0 off", "the watchdog is off"))
        if seconds and as_seconds(seconds) is None:
            rule = "it must be a number of seconds, 0 for none"
            effect = "uninterruptible sleep of workers is not detected"
            self._sink(records.VariableIgnored(UNINTERRUPTIBLE_STATE_TIMEOUT, seconds, rule, effect))

        self._watchdog.start()
        text = self._port
        if text is None or self._health is not None:
            return

        try:
            server = create_healthcheck_server(self.alive_time, int(text), HEALTH_CHECK_TIMEOUT)
            server.start()
        except (ValueError, OSError) as error:
            why = f"{HEALTH_CHECK_PORT}={text!r} is ignored: {error}; the health check is off"
            self._sink(records.HealthCheckReported(why, listens=False))
            return

        self._health = server
        self._sink(records.HealthCheckReported(f"the health check listens on port {server.port}", listens=True))

    def start(self) -> dict[str, str]:
        """Prepare for workers that are about to start; return their additional variables."""
        self._asleep, self._stuck, self._turned = {}, {}, None
        return self._watchdog.start()

    def poll_timeout(self, interval: float) -> float | None:
        """Return the seconds until `look` must be called again; None if it need not be called."""
        return soonest(interval if self._allowed else None, None if self._health is None else _HEALTH_INTERVAL)

    def look(self, pids: Collection[int]) -> bool:
        """Check the running workers *pids*; return whether one has slept for too long."""
        self._turned = wall_time()
        if not self._allowed:
            return False

        now, before = self._clock(), self._asleep

        # For a worker that was not asleep at one check, the time restarts.
        self._asleep = {pid: before.get(pid, now) for pid in pids if is_uninterruptible_state(self._read_state(pid))}
        for pid in self._asleep.keys() - before.keys():
            self._sink(records.WorkerAsleep(pid, self._allowed))
        self._stuck |= {pid: now - begun for pid, begun in self._asleep.items() if now - begun >= self._allowed}
        return bool(self._stuck)

    def explained(self, failures: dict[int, ProcessFailure], pids: Mapping[int, int]) -> dict[int, ProcessFailure]:
        """
        Return *failures*, by global rank, with the watchdog's reasons and the workers that are stuck.

        *pids* has the process id of each worker of this node.
        """
        for failure in failures.values():
            self._watchdog.explain(failure)
        found = dict(failures)
        for rank, pid in pids.items():
            if pid in self._stuck:
                found[rank] = ProcessFailure(
                    rank - min(pids),
                    pid,
                    # It gets SIGKILL, though the kernel may not deliver that yet.
                    -signal.SIGKILL,
                    "",
                    message=f"PID {pid} was in uninterruptible sleep (state D) for {self._stuck[pid]:.0f} s",
                    rank=rank,
                    hint="it waits in the kernel for a device or a file system, so a restart on this host would "
                    f"fail again; look at /proc/{pid}/stack and dmesg of host {os.uname().nodename}",
                    fatal=True,
                )

        return found

    def rest(self) -> None:
        """Note that no workers run: they are being stopped or are gone."""
        self._turned = None

    def alive_time(self) -> int:
        """Return the Unix time of the agent's last progress; now while no workers run."""
        turned = int(wall_time() if self._turned is None else self._turned)
        progress = self._watchdog.last_progress()
        # The older time: the agent's loop or the watchdog's thread may hang, each alone.
        return turned if progress is None else min(turned, progress)

    def close(self) -> None:
        """Stop all services; it may be called twice."""
        self._turned = None
        self._watchdog.stop()
        server, self._health = self._health, None
        if server is not None:
            stop_health_check(server, self._sink)


def stop_health_check(server: HealthCheckServer, sink: records.Sink) -> None:
    """Stop *server*, which may be a caller's own; report its error to *sink* and ignore it."""
    try:
        server.stop()
    except Exception as error:
        why = f"the health check {server!r} could not be stopped: {type(error).__name__}: {error}"
        sink(records.HealthCheckReported(why, listens=False))


class Watchdog:
    """
    Watchdog for the timers of one agent's workers; *environment* is the agent's own.

    Without ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` it does nothing.
    """

    def __init__(self, environment: Mapping[str, str], run_id: str, sink: records.Sink) -> None:
        self._wanted = environment.get(ENABLE) == "1"
        self._given_path = environment.get(FILE)
        self._path = self._given_path or ""
        self._run_id = run_id
        self._sink = sink
        self._server: FileTimerServer | None = None
        self._folder: str | None = None
        self._expired: dict[int, str] = {}
        """Name of the timer for which a process was killed, by process id."""

    def start(self) -> dict[str, str]:
        """
        Start the server if it does not run; return the variables by which workers find it.

        Raises `ConfigError` for an invalid path.
        """
        if not self._wanted:
            return {}

        if self._server is None:
            # Imported only here: most launches have no watchdog.
            from elasticlib.timer import FileTimerServer

            if self._given_path is None or _is_read(self._given_path):
                # There is no path, or it belongs to an outer launcher, whose worker this one is.
                self._folder = self._folder or make_temporary_folder("the timers of the watchdog")
                self._given_path, self._path = None, os.path.join(self._folder, "timers")

            try:
                self._server = FileTimerServer(self._path, self._run_id, log_event=self._report)
            except ConfigError as error:
                if self._path != self._given_path:
                    raise
                raise ConfigError(
                    f"{FILE}={self._path!r}: a named pipe cannot be created there: {error.__cause__}; "
                    "give another path, or unset the variable"
                ) from error

            self._server.start()

        return {FILE: self._path}

    def stop(self) -> None:
        """Stop the server and remove the pipe; it may be started again."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def last_progress(self) -> int | None:
        """Return the Unix time of the server's last progress; None while it does not run."""
        return None if self._server is None else self._server.get_last_progress_time()

    def explain(self, failure: ProcessFailure) -> None:
        """Name in *failure* the expired timer for which the worker was killed, if any."""
        scope = self._expired.get(failure.pid)
        # A worker that raised before the signal arrived has a better reason.
        if scope is not None and failure.exitcode < 0 and not failure.exception_type:
            failure.message = f"timer {scope!r} expired: the watchdog sent {failure.signal_name()} to PID {failure.pid}"
            failure.hint = "the worker did not leave the timer's block in time: it hangs, or the time is too short"

    def _report(self, event: str, timer: FileTimerRequest | None) -> None:
        if timer is None:
            self._sink(records.WatchdogReported(event))
            return
        if timer.signal > 0:
            self._expired[timer.worker_pid] = timer.scope_id
        self._sink(
            records.WatchdogReported(event, timer.worker_pid, timer.scope_id, timer.expiration_time, int(timer.signal))
        )


def _is_read(path: str) -> bool:
    """Return whether a process has the named pipe *path* open for reading."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False
        # The kernel refuses this (ENXIO) if no process reads.
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


class Sockets:
    """Sockets for the debug servers of one agent's workers; off unless *wanted*."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._folder: str | None = None

    def open(self) -> str | None:
        """Make the folder and return it; None if no servers are wanted."""
        if self._wanted and self._folder is None:
            self._folder = make_temporary_folder("the sockets of debug servers", _LONGEST - 1 - _RANK_DIGITS)
        return self._folder

    def serving(self, spec: StartSpec) -> StartSpec:
        """Return *spec* with the path of a debug socket; remove the socket of an earlier round."""
        if self._folder is None:
            return spec
        path = os.path.join(self._folder, str(spec.local_rank))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        # For a worker that is not this library's Python, programs that it starts use the variable.
        return replace(spec, server=path, variables={**spec.variables, SERVER_VARIABLE: path})

    def close(self) -> None:
        """Remove the folder; it may be called twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
