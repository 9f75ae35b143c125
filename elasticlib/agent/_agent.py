"""
The agent's loop: wait for what happens, ask the policy, do what it says.

Rules of this file: no decisions (`_policy` makes them), one `_perform`, one case per action. What
differs between kinds of workers is in the hooks that subclasses fill in, with torch's names and
contracts: `_start_workers`, `_stop_workers`, `_monitor_workers`, `_shutdown`.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence

from typing_extensions import assert_never

from elasticlib import records
from elasticlib.agent import _policy, _signals
from elasticlib.errors import (
    ConfigError,
    LaunchInterrupted,
    ProcessFailure,
    RendezvousClosedError,
    SignalException,
    root_cause,
)
from elasticlib.rendezvous import Descriptor, FailureNote, Rendezvous, RoundEnd, Seat
from elasticlib.spec import DEFAULT_SIGNALS, WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState
from elasticlib.workers._wire import HasDescriptor, wait_readable

DEFAULT_ROLE = "default"
LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


class ElasticAgent(abc.ABC):
    """Supervises the workers of one node. (torch: ``torch.distributed.elastic.agent.server.ElasticAgent``)"""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, with restarts, to their end. Raises `SignalException` when a signal ended them."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The present state of the workers, to be read only."""


class SimpleElasticAgent(ElasticAgent):
    """
    An agent for one group of workers, whatever a worker is: subclasses fill in four hooks.

    The hooks and their contracts are those of ``torch.distributed.elastic.agent.server.SimpleElasticAgent``.
    This class looks at its workers with `_monitor_workers` each ``spec.monitor_interval`` seconds; a
    subclass that can tell when there is something to see says so in `_watched` and `_patience`.

    *exit_barrier_timeout* is accepted for torch's sake: the end is agreed, so there is no barrier.
    *shutdown_timeout* is in seconds, from the stop signal to SIGKILL, for every stop.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
        *,
        signals_to_handle: str = DEFAULT_SIGNALS,
        sink: records.Sink = records.log,
    ) -> None:
        if not isinstance(spec.rdzv_handler, Rendezvous):
            raise ConfigError(
                f"rdzv_handler={spec.rdzv_handler!r} is no elasticlib rendezvous: "
                "make one with elasticlib.rendezvous.open_local"
            )
        self._rendezvous = spec.rdzv_handler
        self._shutdown_timeout = shutdown_timeout
        self._sink = sink
        self._worker_group = WorkerGroup(spec)
        self._signals = _signals.Signals(_signals.parse(signals_to_handle))
        self._events: deque[_policy.Event] = deque()
        self._result = RunResult(WorkerState.INIT)
        self._listener: socket.socket | None = None

    # The hooks.

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        """Start a worker per local rank; return their ids by local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers and return when they are gone."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are now: HEALTHY while they run, SUCCEEDED when all ended well, FAILED when one did not."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Stop all workers with *death_sig*, SIGKILL after *timeout* s, and free what they used; may come twice."""

    def _watched(self) -> Sequence[HasDescriptor]:
        """What becomes readable when `_monitor_workers` has something new to tell."""
        return ()

    def _patience(self) -> float | None:
        """Seconds between two looks at workers that run; None when `_watched` tells all."""
        return self._worker_group.spec.monitor_interval

    def _failures(self) -> dict[int, ProcessFailure]:
        """By global rank, the workers that failed in this round; asked again when all are gone."""
        return self._result.failures

    # The loop.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The present state of the workers, to be read only."""
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """
        Run the workers, with restarts, to their end, and return how that was.

        Raises `SignalException` (`LaunchInterrupted`, a ``KeyboardInterrupt``, for SIGINT) when a handled
        signal ended them. Signals are handled in the main thread only; the former handlers are restored.
        """
        with self._signals:
            try:
                return self._run()
            finally:
                self._close_listener()
                self._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def _run(self) -> RunResult:
        state, actions = _policy.begin()
        while True:
            for action in actions:
                if (result := self._perform(action)) is not None:
                    return result
            while not self._events:
                self._events.extend(self._wait())
            event = self._events.popleft()
            if isinstance(event, RoundEnd):
                self._sink(records.RoundEnded(event.round, event.why, event.restart))
            state, actions = _policy.step(state, event)

    def _wait(self) -> list[_policy.Event]:
        """What happened since the last call; blocks until something may have."""
        runs = WorkerState.is_running(self._worker_group.state)
        watched: list[HasDescriptor] = [self._signals, self._rendezvous.member]
        if runs:
            watched += self._watched()
        wait_readable(watched, self._patience() if runs else None)
        events: list[_policy.Event] = [_policy.StopRequested(signum) for signum in self._signals.take()]
        events += self._rendezvous.member.take()
        if runs:
            events += self._look()
        return events

    def _look(self) -> list[_policy.Event]:
        group = self._worker_group
        self._result = self._monitor_workers(group)
        if self._result.state is WorkerState.HEALTHY:
            return []
        group.state = self._result.state
        if self._result.state is WorkerState.SUCCEEDED:
            return [_policy.WorkersSucceeded()]
        if not self._result.failures:
            return [_policy.WorkersFailed(f"workers are {group.state.value}")]
        rank, failure = root_cause(self._result.failures)
        return [_policy.WorkersFailed(f"rank {rank}: {failure.message}")]

    def _perform(self, action: _policy.Action) -> RunResult | None:
        group, member = self._worker_group, self._rendezvous.member
        match action:
            case _policy.Join():
                member.join(self._descriptor())
            case _policy.Start(seat):
                self._take_seat(seat)
                self._started(seat, self._start_workers(group))
            case _policy.Stop(why, signum):
                self._stop(why, signum)
                self._events.append(_policy.WorkersGone())
            case _policy.TellFailed(number):
                member.failed(number, self._notes())
            case _policy.TellStopped(number):
                member.stopped(number, self._notes())
            case _policy.TellSucceeded(number):
                member.succeeded(number)
            case _policy.Leave(why, number):
                with contextlib.suppress(RendezvousClosedError):
                    member.leave(why, number)
            case _policy.Finish(succeeded, why, signum):
                return self._finish(succeeded, why, signum)
            case _:
                assert_never(action)
        return None

    def _descriptor(self) -> Descriptor:
        """What this node offers: among it a socket, bound anew for each round, for the workers' store."""
        spec = self._worker_group.spec
        self._close_listener()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        port = self._listener.getsockname()[1]
        return Descriptor(spec.local_world_size, spec.role, (LOOPBACK,), port)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _take_seat(self, seat: Seat) -> None:
        group = self._worker_group
        self._result = RunResult(WorkerState.INIT)
        group.round, group.restart_count = seat.round, seat.restart_count
        group.group_rank, group.group_world_size = seat.group_rank, seat.group_world_size
        group.master_addr, group.master_port = seat.master_addresses[0], seat.master_port
        group.workers = [
            Worker(rank, seat.rank_base + rank, seat.role_rank_base + rank, seat.world_size, seat.role_world_size)
            for rank in range(group.spec.local_world_size)
        ]
        if seat.group_rank != 0:
            self._close_listener()

    def _started(self, seat: Seat, ids: dict[int, object]) -> None:
        group = self._worker_group
        self._close_listener()  # whoever hosts the store holds a descriptor of its own
        for worker in group.workers:
            worker.id = ids.get(worker.local_rank)
        group.state = WorkerState.HEALTHY
        pids = {rank: value for rank, value in ids.items() if isinstance(value, int)}
        master = f"{group.master_addr}:{group.master_port}"
        sizes = (seat.group_rank, seat.group_world_size, seat.world_size)
        counts = (seat.restart_count, seat.max_restarts)
        self._sink(records.RoundStarted(seat.round, *sizes, *counts, master, pids, seat.why))

    def _stop(self, why: str, signum: int | None) -> None:
        group = self._worker_group
        number = signal.SIGTERM if signum is None else signal.Signals(signum)
        self._sink(records.WorkersStopping(group.round, why, number, self._shutdown_timeout))
        if signum is None:
            self._stop_workers(group)
        else:
            self._shutdown(number, self._shutdown_timeout)
        group.state = WorkerState.STOPPED

    def _notes(self) -> tuple[FailureNote, ...]:
        now = time.time()
        return tuple(
            FailureNote(
                failure.rank,
                failure.local_rank,
                failure.pid,
                failure.exitcode,
                failure.message,
                failure.exception_type,
                failure.traceback,
                failure.hint,
                failure.secondary,
                max(0.0, now - failure.timestamp),
            )
            for failure in self._failures().values()
        )

    def _finish(self, succeeded: bool, why: str, signum: int | None) -> RunResult:
        group = self._worker_group
        if signum is not None:
            name = signal.Signals(signum).name
            kind = LaunchInterrupted if signum == signal.SIGINT else SignalException
            raise kind(f"process {os.getpid()} got {name}: its workers were stopped", signal.Signals(signum))
        if succeeded:
            group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED, self._result.return_values)
        group.state = WorkerState.FAILED
        return RunResult(WorkerState.FAILED, {}, self._failures())
