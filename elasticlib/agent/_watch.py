"""
What an agent has beside its workers to look after them: watchdog, health check, and an eye on uninterruptible sleep.

Rules of this file: all of it is off unless asked for, and then costs nothing; none of it can end the job by its own
fault: a port that is taken is a warning.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

from elasticlib import records
from elasticlib._clock import Clock, monotonic
from elasticlib.agent import _uninterruptible
from elasticlib.agent._health import HealthCheckServer, create_healthcheck_server
from elasticlib.agent._watchdog import ENABLE, Watchdog
from elasticlib.errors import ConfigError, ProcessFailure
from elasticlib.utils.process_state import is_uninterruptible_state, read_proc_state

HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
HEALTH_CHECK_TIMEOUT = 60
"""Seconds without progress after which the health check calls an agent dead."""
_HEALTH_INTERVAL = 10.0
"""Seconds between two turns of the agent's loop, at most, where a health check asks for them."""


class Watch:
    """
    Looks after the workers of one agent as the variables of *environment* and the arguments say.

    *health_check_server* is one that the caller has started, or will; it is stopped with the others, and beats the
    variable. *read_state* and *clock* are for tests.
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
        self._ignored = _ignored(environment, self._watchdog.unclear, uninterruptible_state_timeout)
        self._health = health_check_server
        self._allowed = _uninterruptible.allowed_time(
            uninterruptible_state_timeout, environment.get(UNINTERRUPTIBLE_STATE_TIMEOUT)
        )
        self._read_state = read_state
        self._clock = clock
        self._asleep: dict[int, float] = {}
        self._stuck: dict[int, float] = {}
        self._turned: float | None = None
        """When the agent's loop last looked at workers that run; None while it has none to look at."""

    def open(self) -> None:
        """
        Have all of it run that needs no workers: the watchdog, and the health check, if the environment names a port.

        Raises `ConfigError` for a path where the watchdog can have no pipe.
        """
        for record in self._ignored:
            self._sink(record)
        self._watch_timers()
        text = self._port
        if text is None or self._health is not None:
            return
        try:
            server = create_healthcheck_server(self.alive_time, int(text), HEALTH_CHECK_TIMEOUT)
            server.start()
        except (ValueError, OSError) as error:
            why = f"{HEALTH_CHECK_PORT}={text!r} is ignored: {error}; there is no health check"
            self._sink(records.HealthCheckReported(why, listens=False))
            return
        self._health = server
        self._sink(records.HealthCheckReported(f"the health check listens on port {server.port}", listens=True))

    def start(self) -> dict[str, str]:
        """Begin to look after workers that are about to start; the variables that they get for it."""
        self._asleep, self._stuck, self._turned = {}, {}, None
        return self._watch_timers()

    def patience(self, interval: float) -> float | None:
        """Seconds until `look` is due again, where that is asked for each *interval*; None where it is not."""
        asked = [interval] if self._allowed else []
        if self._health is not None:
            asked.append(_HEALTH_INTERVAL)
        return min(asked, default=None)

    def look(self, pids: Collection[int]) -> bool:
        """See how workers that run are; whether one of them is past help."""
        self._turned = time.time()
        if not self._allowed:
            return False
        now = self._clock()
        asleep = [pid for pid in pids if is_uninterruptible_state(self._read_state(pid))]
        before, self._asleep = self._asleep, _uninterruptible.look(self._asleep, asleep, now)
        for pid in self._asleep.keys() - before.keys():
            self._sink(records.WorkerAsleep(pid, self._allowed))
        self._stuck.update(_uninterruptible.overdue(self._asleep, self._allowed, now))
        return bool(self._stuck)

    def explained(self, failures: dict[int, ProcessFailure], pids: Mapping[int, int]) -> dict[int, ProcessFailure]:
        """The *failures*, by global rank, with what only this knows of them; *pids* are those of all workers here."""
        for failure in failures.values():
            self._watchdog.explain(failure)
        stuck = {
            rank: _stuck(rank, rank - min(pids), pid, self._stuck[pid])
            for rank, pid in pids.items()
            if pid in self._stuck
        }
        return {**failures, **stuck}

    def rest(self) -> None:
        """The workers are being stopped, or are gone: the loop turns for others now."""
        self._turned = None

    def alive_time(self) -> int:
        """When the agent was last seen at work, in seconds since the epoch; now, while it has no workers to watch."""
        times = [int(time.time() if self._turned is None else self._turned)]
        progress = self._watchdog.last_progress()
        if progress is not None:
            times.append(progress)
        return min(times)

    def close(self) -> None:
        """End all of it; may come twice."""
        self._turned = None
        self._watchdog.stop()
        server, self._health = self._health, None
        if server is not None:
            stop_health_check(server, self._sink)

    def _watch_timers(self) -> dict[str, str]:
        try:
            return self._watchdog.start()
        except ConfigError:
            self._watchdog.stop()
            raise


def stop_health_check(server: HealthCheckServer, sink: records.Sink) -> None:
    """Stop *server*, which may be a caller's own; what it raises is told to *sink*, and costs nothing else."""
    try:
        server.stop()
    except Exception as error:
        why = f"the health check {server!r} could not be stopped: {type(error).__name__}: {error}"
        sink(records.HealthCheckReported(why, listens=False))


def _ignored(environment: Mapping[str, str], enable: str, argument: float | None) -> list[records.VariableIgnored]:
    """The variables that ask for something here in words which are not understood."""
    found = []
    if enable:
        found.append(records.VariableIgnored(ENABLE, enable, "1 turns it on, 0 off", "there is no watchdog"))
    seconds = environment.get(UNINTERRUPTIBLE_STATE_TIMEOUT)
    if argument is None and seconds and _uninterruptible.number(seconds) is None:
        rule, effect = "it must be a number of seconds, 0 for none", "no worker is watched for uninterruptible sleep"
        found.append(records.VariableIgnored(UNINTERRUPTIBLE_STATE_TIMEOUT, seconds, rule, effect))
    return found


def _stuck(rank: int, local_rank: int, pid: int, seconds: float) -> ProcessFailure:
    return ProcessFailure(
        local_rank,
        pid,
        -signal.SIGKILL,  # what it is sent, though it may not heed it yet
        "",
        message=f"PID {pid} was in uninterruptible sleep (state D) for {seconds:.0f} s",
        rank=rank,
        hint="it waits in the kernel for a device or a file system, and holds it: a restart here would fail again; "
        f"look at /proc/{pid}/stack and dmesg of host {os.uname().nodename}",
        fatal=True,
    )
