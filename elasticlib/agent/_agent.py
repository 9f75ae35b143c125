"""
The agent's loop: wait for what happens, ask the policy, do what it says.

Rules of this file: no decisions (`_policy` makes them), one `_perform`, one case per action. What
differs between kinds of workers is in the hooks that subclasses fill in, with torch's names and
contracts: `_start_workers`, `_stop_workers`, `_monitor_workers`, `_shutdown`.
"""

from __future__ import annotations

import abc
import contextlib
import signal
import socket
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import assert_never

from elasticlib import _rules, events, metrics, records
from elasticlib._clock import Clock, monotonic
from elasticlib._times import soonest
from elasticlib.agent import _checks, _policy
from elasticlib.agent._outcome import agreed, error_of, notes
from elasticlib.agent._telemetry import Telemetry, trace_of
from elasticlib.errors import ProcessFailure, RendezvousClosedError, RendezvousError, StartError, root_cause
from elasticlib.processes import Waitable, wait_readable
from elasticlib.rendezvous import Membership, Rendezvous, Word
from elasticlib.rendezvous.handlers import CoordinatedHandler, first_reachable
from elasticlib.rendezvous.protocol import (
    ContactLost,
    Failed,
    Final,
    Leave,
    RankAssignment,
    RoundEnd,
    Stopped,
    Succeeded,
)
from elasticlib.rendezvous.third_party import HandlerMember, checked_handler
from elasticlib.spec import DEFAULT_SIGNALS, WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState
from elasticlib.workers import Inbox, NoticeReceived, Signals, StacksRequest, StopRequest, parse_signals

DEFAULT_ROLE = "default"
_NOT_WELL = (WorkerState.FAILED, WorkerState.UNHEALTHY, WorkerState.UNKNOWN)
_LONGEST_WHY = 1000
"""Characters of an error that the other nodes are told."""


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
    subclass that can tell when there is something to see says so in `_watched` and `_poll_timeout`.

    *exit_barrier_timeout* is accepted for torch's sake: the end is agreed, so there is no barrier.
    *shutdown_timeout* is in seconds, from the stop signal to SIGKILL, for every stop. What happens goes to *sink*, as
    events to ``spec.event_log_handler`` and as metrics to *metric_handler*, by default the program's for the group
    ``torchelastic``; an event log handler that is not known raises `UnknownNameError` here. What other threads ask of
    the run comes through *inbox*.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _checks.warn_of_uncalled_methods(cls, SimpleElasticAgent)

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
        *,
        signals_to_handle: str = DEFAULT_SIGNALS,
        sink: records.Sink = records.log,
        clock: Clock = monotonic,
        metric_handler: metrics.MetricHandler | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        _rules.check_shutdown_timeout(shutdown_timeout)
        handler: Any = spec.rdzv_handler
        self._member: Membership
        if isinstance(handler, Rendezvous):
            self._run_id, self._member = handler.run_id, handler.member
        else:
            checked_handler(handler)
            self._run_id = str(handler.get_run_id())
        self._shutdown_timeout = shutdown_timeout
        self._grace = shutdown_timeout
        """Seconds that `_stop_workers` gives the workers of the present round."""
        self._worker_group = WorkerGroup(spec)
        self._telemetry = Telemetry(self._worker_group, self._run_id, sink, clock, metric_handler)
        self._sink = self._telemetry.sink
        self._signals = Signals(parse_signals(signals_to_handle), inbox, takes_notices=True)
        self._events: deque[_policy.Event] = deque()
        self._result = RunResult(WorkerState.INIT)
        self._listener: socket.socket | None = None
        self._has_other_master = False
        """Whether the workers of the present round find their master elsewhere than at the round's store."""
        self._broken: RendezvousError | None = None
        self._runs = False
        """Whether workers were started, and not stopped since."""
        self._ended = False
        """Whether the run has come to an end of which the others know."""
        self._assigned = False
        """Whether what is known of workers belongs to the present ranks."""
        self._state, _ = _policy.begin()

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

    def _make_ready(self) -> None:
        """Raise what would keep workers from starting, while this node, about to ask for ranks, disturbs nobody."""

    def _watched(self) -> Sequence[Waitable]:
        """What becomes readable when `_monitor_workers` has something new to tell."""
        return ()

    def _poll_timeout(self) -> float | None:
        """Seconds between two looks at workers that run; None when `_watched` tells all."""
        return self._worker_group.spec.monitor_interval

    def _serves_others(self) -> bool:
        """Whether this node hosts the store of the round for workers of other nodes, too: they may outlive its own."""
        return False

    def _finds_store_lost(self) -> bool:
        """Look at that store; whether it is gone."""
        return False

    def _dump_stacks(self) -> None:
        """Have workers that run write down the stacks of their threads; those come as `records.StacksTold`."""

    def _pass_on(self, signum: signal.Signals) -> None:
        """Send *signum* to the workers that handle it, and to nobody else."""

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
        signal ended them. Signals are handled in the main thread only; the former handlers are restored. Where
        anything else ends the run, such as an error of a hook, the other nodes learn of it as this node's leaving.
        """
        with self._signals, self._meeting() as self._member, self._telemetry.run():
            left = None
            try:
                self._telemetry.result = result = self._run()
                return result
            except BaseException as error:
                left = self._bow_out(error)
                raise
            finally:
                self._close_listener()
                self._shutdown(signal.SIGTERM, self._shutdown_timeout)
                if left is not None:
                    with contextlib.suppress(RendezvousError):
                        self._member.post(Stopped(self._member.node, left, ()))

    # What is told of it.

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """While entered, time passes that an event *state* will tell as ``duration_ms``, however the block ends."""
        return self._telemetry.timed(state)

    def conclude(self, error: BaseException | None = None) -> None:
        """Tell that the agent did its work, or what kept it from it; a launch says so after `run`."""
        if error is None:
            self._sink(records.AgentSucceeded())
        else:
            self._sink(records.AgentFailed(trace_of(error)))

    def get_event_succeeded(self) -> events.Event:
        """The event of an agent that did its work, for the caller to record. (torch's method)"""
        return self._telemetry.last_event("SUCCEEDED")

    def get_event_failed(self) -> events.Event:
        """The event of an agent that raised what is being handled, for the caller to record. (torch's method)"""
        return self._telemetry.last_event("FAILED", traceback.format_exc())

    def _meeting(self) -> AbstractContextManager[Membership]:
        """A handler's job is taken part in for the length of a run; a rendezvous of ours is its opener's."""
        spec = self._worker_group.spec
        if isinstance(spec.rdzv_handler, Rendezvous):
            return contextlib.nullcontext(self._member)
        if isinstance(spec.rdzv_handler, CoordinatedHandler):
            return spec.rdzv_handler.open_membership(spec.max_restarts, spec.local_addr)
        member = HandlerMember(
            spec.rdzv_handler,
            max_restarts=spec.max_restarts,
            monitor_interval=spec.monitor_interval,
            local_addr=spec.local_addr,
        )
        return contextlib.closing(member)

    def _bow_out(self, error: BaseException) -> int | None:
        """Tell the others why this node goes, unless they know; the round whose workers still run here."""
        if self._ended or isinstance(error, RendezvousError):
            return None
        number = self._worker_group.round if self._runs else None
        # The error that is being handled says more.
        with contextlib.suppress(RendezvousError):
            why = f"{type(error).__name__}: {error}"[:_LONGEST_WHY].rstrip(": ")
            self._member.post(Leave(self._member.node, why, number))
        return number

    def _run(self) -> RunResult:
        self._state, actions = _policy.begin()
        while True:
            for action in actions:
                if (result := self._perform(action)) is not None:
                    return result
            while not self._events:
                self._events.extend(self._wait())
            event = self._events.popleft()
            if isinstance(event, RoundEnd | Final):
                self._telemetry.ended(event)
            self._state, actions = _policy.step(self._state, event)

    def _wait(self) -> list[_policy.Event]:
        """Return the events since the last call; block until there may be some."""
        runs = WorkerState.is_running(self._worker_group.state)
        serves = _policy.awaits_others(self._state) and self._serves_others()
        lost = self._lost_store(serves)
        if lost:
            return lost
        self._wait_readable(has_processes=runs or serves)
        events: list[_policy.Event] = [*self._requests()]
        # Workers may have been killed because contact was lost: looked at first, that is heard of before them.
        seen = self._look() if runs else []
        # The lost store is the cause of failures that other nodes report, so it comes first.
        events += self._lost_store(serves)
        return [*events, *self._words(), *seen]

    def _lost_store(self, serves: bool) -> list[_policy.Event]:
        """Return the loss of the workers' store, where this node still *serves* it to others."""
        return [_policy.WorkerStoreLost()] if serves and self._finds_store_lost() else []

    def _wait_readable(self, *, has_processes: bool) -> None:
        watched: list[Waitable] = [self._signals, self._member]
        limit = None
        if has_processes:
            watched += self._watched()
            limit = self._poll_timeout()
        wait_readable(watched, soonest(self._member.poll_timeout(), limit))

    def _requests(self) -> list[_policy.StopRequested]:
        """Carry out the requests of signals and the program; return the stops among them, oldest first."""
        stops = []
        for item in self._signals.inbox.drain():
            match item:
                case int():
                    stops.append(_policy.StopRequested(item))
                case StopRequest(why, grace):
                    stops.append(_policy.StopRequested(signal.SIGTERM, why, grace))
                case StacksRequest(why):
                    # Without a reason the program itself gets the stacks, and the console shows none.
                    if why:
                        self._sink(records.StacksShown(why))
                    self._dump_stacks()
                case NoticeReceived(signum):
                    self._pass_on(signal.Signals(signum))
        return stops

    def _look(self) -> list[_policy.Event]:
        group = self._worker_group
        with self._telemetry.measured(self._monitor_workers):
            self._result = self._monitor_workers(group)
        for rank, failure in self._result.failures.items():
            # torch's failures, and so those of its users' agents, have no global rank.
            failure.rank = rank
        self._telemetry.seen(self._result)
        if self._result.state is WorkerState.HEALTHY:
            return []
        group.step(self._result.state, "_monitor_workers said so")
        if self._result.state is WorkerState.SUCCEEDED:
            return [_policy.WorkersSucceeded()]
        if not self._result.failures:
            return [_policy.WorkersFailed(f"workers are {group.state.value}")]
        rank, failure = root_cause(self._result.failures)
        return [_policy.WorkersFailed(failure.message if failure.process else f"rank {rank}: {failure.message}")]

    def _perform(self, action: _policy.Action) -> RunResult | None:
        group, member = self._worker_group, self._member
        match action:
            case _policy.AskForRanks():
                self._assigned = False
                # Ranks that were taken in already answer an earlier request: with this one it is given up.
                self._events = deque(event for event in self._events if not isinstance(event, RankAssignment))
                self._make_ready()
                self._telemetry.sought(member.node)
                member.join(group.spec.local_world_size, group.spec.role)
            case _policy.Start(assignment):
                self._telemetry.assigned(assignment)
                with self._telemetry.ranking():
                    self._take_ranks(assignment)
                self._begin(assignment)
            case _policy.StopWorkers(why, signum, grace):
                self._stop(why, signum, grace)
                # Contact that was lost meanwhile explains why workers were killed: it is heard of first.
                # It is raised again at the next wait.
                with contextlib.suppress(RendezvousError):
                    self._listen()
                self._events.append(_policy.WorkersGone(self._result.state is WorkerState.SUCCEEDED))
            case _policy.TellFailed(number):
                member.post(Failed(member.node, number, notes(self._failures().values())))
            case _policy.TellStopped(number):
                failures = self._failures()
                member.post(Stopped(member.node, number, notes(failures.values())))
                self._telemetry.stopped(failures)
            case _policy.TellSucceeded(number):
                member.post(Succeeded(member.node, number))
            case _policy.LeaveJob(why, number):
                with contextlib.suppress(RendezvousClosedError):
                    member.post(Leave(member.node, why, number))
            case _policy.Finish():
                return self._finish(action)
            case _:
                assert_never(action)
        return None

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _take_ranks(self, assignment: RankAssignment) -> None:
        group = self._worker_group
        self._result = RunResult(WorkerState.INIT)
        self._assigned = True
        group.round, group.restart_count = assignment.round, assignment.restart_count
        group.group_rank, group.group_world_size = assignment.group_rank, assignment.group_world_size
        self._close_listener()
        self._listener = self._member.listener() if assignment.group_rank == 0 else None
        places, port = assignment.master_addresses, assignment.master_port
        addr = places[0] if assignment.group_rank == 0 else first_reachable(places, port)
        group.master_addr, group.master_port = _checks.master_of(group.spec, addr, port)
        self._has_other_master = (group.master_addr, group.master_port) != (addr, port)
        sizes = assignment.world_size, assignment.role_world_size
        group.workers = [
            Worker(rank, assignment.rank_base + rank, assignment.role_rank_base + rank, *sizes)
            for rank in range(group.spec.local_world_size)
        ]

    def _words(self) -> list[Word]:
        """What the rendezvous has to say; raises what broke it, as often as it is asked."""
        if self._broken is None:
            try:
                return self._member.drain()
            except RendezvousError as error:
                self._broken = error
        raise self._broken

    def _listen(self) -> bool:
        """Take in what the rendezvous has to say by now; whether contact is lost."""
        self._events.extend(self._words())
        return any(isinstance(event, ContactLost) for event in self._events)

    def _begin(self, assignment: RankAssignment) -> None:
        if self._listen():
            # This process stood still, and other nodes may have the ranks by now.
            return
        self._runs, group = True, self._worker_group
        try:
            with self._telemetry.measured(self._start_workers):
                ids = self._start_workers(group)
        except StartError:
            if self._listen():
                # It stood still until its spawner was killed: lost contact is the cause.
                return
            raise
        # The process that hosts the store has a descriptor of its own.
        self._close_listener()
        for worker in group.workers:
            worker.id = ids.get(worker.local_rank)
        group.step(WorkerState.HEALTHY, f"started for round {assignment.round}")
        self._telemetry.started(assignment, {rank: value for rank, value in ids.items() if isinstance(value, int)})

    def _stop(self, why: str, signum: int | None, grace: float | None) -> None:
        group = self._worker_group
        number = signal.SIGTERM if signum is None else signal.Signals(signum)
        limit = self._shutdown_timeout
        self._grace = limit if grace is None else grace if signum is not None else min(grace, limit)
        self._sink(records.WorkersStopping(group.round, why, number, self._grace))
        self._telemetry.stopping()
        if signum is not None:
            self._shutdown(number, self._grace)
        elif self._runs:
            with self._telemetry.measured(self._stop_workers):
                self._stop_workers(group)
        self._runs = False
        group.step(WorkerState.STOPPED, why)

    def _finish(self, end: _policy.Finish) -> RunResult:
        """Return the result of the run, or raise the error that ended it."""
        self._ended = True
        if end.succeeded:
            return self._succeed(end)
        if end.stop is None:
            self._worker_group.step(WorkerState.FAILED, end.why)
        error = error_of(end)
        if error is not None:
            raise error
        own = self._failures() if self._assigned else {}
        failures = agreed(own, end.final, self._member.node)
        workers_failed = self._assigned and self._result.state in _NOT_WELL
        if not failures and not workers_failed:
            # Such as a host that was lost again and again.
            raise RendezvousClosedError(end.why)
        return RunResult(WorkerState.FAILED, {}, failures)

    def _succeed(self, end: _policy.Finish) -> RunResult:
        self._worker_group.step(WorkerState.SUCCEEDED, end.why)
        if not end.results:
            self._sink(records.NotNeeded(self._member.node, end.why))
            return RunResult(WorkerState.SUCCEEDED)
        if end.final is None:
            self._sink(records.OutcomeMissed(self._member.node, end.why))
        return RunResult(WorkerState.SUCCEEDED, self._result.return_values)
