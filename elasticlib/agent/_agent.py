"""
The agent's loop: it waits for events, asks the policy and carries out its actions.

Rules of this file: no decisions (`_policy` makes them), one `_perform`, one case per action.
Subclasses implement hooks for their kind of workers, with torch's names and contracts:
`_start_workers`, `_stop_workers`, `_monitor_workers`, `_shutdown`.
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
from elasticlib._clock import Clock, monotonic, wall_time
from elasticlib._times import soonest
from elasticlib.agent import _checks, _policy
from elasticlib.agent._end_notice import EndNotice, StopRequests
from elasticlib.agent._outcome import agreed, error_of, notes
from elasticlib.agent._telemetry import Telemetry, trace_of
from elasticlib.errors import ProcessFailure, RendezvousClosedError, RendezvousError, StartError, root_cause
from elasticlib.processes import Waitable, wait_readable
from elasticlib.rendezvous import Membership, MembershipEvent, Rendezvous
from elasticlib.rendezvous.handlers import first_reachable
from elasticlib.rendezvous.protocol import (
    CallsCounted,
    Close,
    ContactLost,
    Failed,
    Final,
    Leave,
    RankAssignment,
    RoundEnd,
    Stopped,
    StopWanted,
    Succeeded,
)
from elasticlib.spec import DEFAULT_SIGNALS, WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState
from elasticlib.workers import Inbox, NoticeReceived, Signals, StacksRequest, StopRequest, parse_signals

DEFAULT_ROLE = "default"
_NOT_WELL = (WorkerState.FAILED, WorkerState.UNHEALTHY, WorkerState.UNKNOWN)
_LONGEST_WHY = 1000
"""Maximum number of characters of an error that is sent to the other nodes."""


class ElasticAgent(abc.ABC):
    """
    Supervisor of the workers of one node.

    (torch: ``torch.distributed.elastic.agent.server.ElasticAgent``)
    """

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, with restarts, to their end. Raises `SignalException` after a signal."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the current state of the workers; callers must not change it."""


class SimpleElasticAgent(ElasticAgent):
    """
    Agent for one group of workers of any kind: subclasses implement four hooks.

    The hooks and their contracts are those of
    ``torch.distributed.elastic.agent.server.SimpleElasticAgent``. This class calls
    `_monitor_workers` every ``spec.monitor_interval`` seconds. A subclass that can be notified of
    changes overrides `_watched` and `_poll_timeout`.

    *exit_barrier_timeout* is accepted for compatibility with torch and ignored: the nodes agree on
    the end, without a barrier. *shutdown_timeout* is the time in seconds from the stop signal to
    SIGKILL, for every stop. Records go to *sink*, events to ``spec.event_log_handler``, metrics to
    *metric_handler* (default: the program's handler for the group ``torchelastic``). Other threads
    send requests through *inbox*. *end_notice* has the signals that announce the end of this node.
    Raises `UnknownNameError` for an unknown event log handler.
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
        end_notice: EndNotice | None = None,
    ) -> None:
        _rules.check_shutdown_timeout(shutdown_timeout)
        handler: Any = spec.rdzv_handler
        self._member: Membership
        if isinstance(handler, Rendezvous):
            self._run_id, self._member = handler.run_id, handler.member
        else:
            # Only here: a launch starts sooner without what only handlers need.
            from elasticlib.rendezvous.third_party import checked_handler

            checked_handler(handler)
            self._run_id = str(handler.get_run_id())

        self._shutdown_timeout = shutdown_timeout
        self._stops = StopRequests(EndNotice() if end_notice is None else end_notice, shutdown_timeout)
        self._grace = shutdown_timeout
        """Seconds until SIGKILL in the next `_stop_workers`."""
        self._worker_group = WorkerGroup(spec)
        self._telemetry = Telemetry(self._worker_group, self._run_id, sink, clock, metric_handler)
        self._sink = self._telemetry.sink
        self._signals = Signals(parse_signals(signals_to_handle), inbox, takes_notices=True)
        self._events: deque[_policy.Event] = deque()
        self._result = RunResult(WorkerState.INIT)
        self._listener: socket.socket | None = None
        self._has_other_master = False
        """True if the workers' master of the current round is not the round's store."""
        self._broken: RendezvousError | None = None
        self._runs = False
        """True if workers were started and not stopped since."""
        self._ended = False
        """True if the run has ended and the other nodes know it."""
        self._assigned = False
        """True if the failures and results belong to the current ranks."""
        self._state, _ = _policy.begin()

    # The hooks.

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        """Start one worker for each local rank; return their ids by local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers and return when they are gone."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """
        Return the state of the workers.

        HEALTHY while they run, SUCCEEDED when all have succeeded, FAILED when one has failed.
        """

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """
        Stop all workers with *death_sig*, then SIGKILL after *timeout* s, and free their resources.

        It may be called twice.
        """

    def _make_ready(self) -> None:
        """Raise errors that would keep workers from starting, before this node asks for ranks."""

    def _watched(self) -> Sequence[Waitable]:
        """Return objects that become readable when `_monitor_workers` has news."""
        return ()

    def _poll_timeout(self) -> float | None:
        """Return the seconds between two calls of `_monitor_workers`; None: `_watched` suffices."""
        return self._worker_group.spec.monitor_interval

    def _serves_others(self) -> bool:
        """Return whether this node hosts the round's store also for workers of other nodes."""
        return False

    def _finds_store_lost(self) -> bool:
        """Check the store of `_serves_others` and return whether it is lost."""
        return False

    def _dump_stacks(self) -> None:
        """Ask running workers for their threads' stacks; `records.StacksReported` reports them."""

    def _pass_on(self, signum: signal.Signals) -> bool:
        """Send *signum* to those workers that handle it; return whether there are any."""
        return False

    def _await_return(self, grace: float) -> None:
        """Begin the *grace* seconds in which workers that handle a notice may return."""

    def _listens(self) -> bool:
        """Return whether a worker of this round asks whether it should stop."""
        return False

    def _begin_stop(self, signum: signal.Signals, grace: float) -> None:
        """Prepare a stop within *grace* seconds; pass *signum* on to workers that handle it and do not ask."""

    def _ask_workers(self, why: str, grace: float, ranks: range) -> None:
        """Ask the workers to return at a common step within *grace* seconds, since *ranks* must end."""

    def _counted_calls(self) -> tuple[int, float, int] | None:
        """Return news of the workers' calls: most calls, calls per second, and the proposal that they know since."""
        return None

    def _propose(self, call: int) -> None:
        """Let the workers wait in this call of ``should_stop``."""

    def _agree(self) -> None:
        """Let the workers return in the proposed call."""

    def _spare_savers(self) -> None:
        """Let workers that save because they were asked to stop ignore SIGTERM, until SIGKILL."""

    def _stop_timeout(self) -> float | None:
        """Return the seconds until the course of a common stop must be looked at; None without one."""
        return None

    def _stop_due(self) -> _policy.StopDue | None:
        """Return the event that workers which were asked to stop have little time left; None if they have time."""
        return None

    def _were_stopped(self) -> bool:
        """Return whether a worker has returned because it was asked to stop."""
        return False

    def _ended_well(self) -> bool:
        """Return whether all workers have ended with success, also after a stop."""
        return False

    def _failures(self) -> dict[int, ProcessFailure]:
        """Return the failures of this round by global rank; called again when all are gone."""
        return self._result.failures

    # The loop.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the current state of the workers; callers must not change it."""
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """
        Run the workers, with restarts, to their end, and return the result.

        Raises `SignalException` (for SIGINT `LaunchInterrupted`, a ``KeyboardInterrupt``) if a
        handled signal ended them. Signals are handled only in the main thread; the former handlers
        are restored. If anything else ends the run, such as an error of a hook, the other nodes
        see that this node leaves.
        """
        with self._signals, self._meeting() as self._member, self._telemetry.run():
            left = None
            try:
                self._telemetry.result = result = self._run()
                return result
            except BaseException as error:
                if self._state.agreed:
                    self._spare_savers()
                left = self._bow_out(error)
                raise
            finally:
                self._close_listener()
                self._shutdown(signal.SIGTERM, self._shutdown_timeout)
                # Only now: other nodes may get these ranks as soon as they know that no worker is
                # left here.
                if left is not None:
                    with contextlib.suppress(RendezvousError):
                        self._member.post(Stopped(self._member.node, left, ()))

    # Events.

    def lost_hosts(self) -> tuple[str, ...]:
        """Return hosts whose nodes the job has lost, after `run`; some of them if there are many."""
        final = self._state.final
        return () if final is None else final.lost_hosts

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Time the block; an event *state* then has its ``duration_ms``, however the block ends."""
        return self._telemetry.timed(state)

    def conclude(self, error: BaseException | None = None) -> None:
        """Record the success of the agent, or *error*; a launch calls it after `run`."""
        if error is None:
            self._sink(records.AgentSucceeded())
        else:
            self._sink(records.AgentFailed(trace_of(error)))

    def get_event_succeeded(self) -> events.Event:
        """Return the event of a successful agent, for the caller to record. (torch's method)"""
        return self._telemetry.last_event("SUCCEEDED")

    def get_event_failed(self) -> events.Event:
        """Return the event of the exception being handled, for the caller to record. (torch's)"""
        return self._telemetry.last_event("FAILED", traceback.format_exc())

    def _meeting(self) -> AbstractContextManager[Membership]:
        """Return a context manager that takes part in the job for the length of a run."""
        spec = self._worker_group.spec

        # The opener of a `Rendezvous` closes it.
        if isinstance(spec.rdzv_handler, Rendezvous):
            return contextlib.nullcontext(self._member)

        from elasticlib.rendezvous.handlers import CoordinatedHandler
        from elasticlib.rendezvous.third_party import HandlerMember

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
        """Report to the other nodes why this node leaves. Return the round whose workers still run here, or None."""
        # The other nodes know already.
        if self._ended or isinstance(error, RendezvousError):
            return None
        number = self._worker_group.round if self._runs else None
        # The error that is being handled matters more.
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
        events: list[_policy.Event] = [*self._requests(), *self._kept_request()]

        # Workers may have been killed because contact was lost. They are checked first, so that the
        # loss, which is read later, is handled before them.
        seen = self._look() if runs else []

        # The lost store is the cause of failures that other nodes report, so it comes first.
        events += self._lost_store(serves)
        return [*events, *self._words(), *seen, *self._course_of_stop()]

    def _course_of_stop(self) -> list[_policy.Event]:
        """Report the workers' calls to the coordinator; return the event that their time is over."""
        counted = self._counted_calls()
        if counted is not None:
            self._member.post(CallsCounted(self._member.node, self._worker_group.round, *counted))
        due = self._stop_due()
        return [due] if due is not None else []

    def _lost_store(self, serves: bool) -> list[_policy.Event]:
        """Return the loss of the workers' store, if this node *serves* it and it is lost."""
        return [_policy.WorkerStoreLost()] if serves and self._finds_store_lost() else []

    def _wait_readable(self, *, has_processes: bool) -> None:
        watched: list[Waitable] = [self._signals, self._member]
        limit = None
        if has_processes:
            watched += self._watched()
            limit = soonest(self._poll_timeout(), self._stops.poll_timeout())
        wait_readable(watched, soonest(self._member.poll_timeout(), limit, self._stop_timeout()))

    def _requests(self) -> list[_policy.StopRequested]:
        """Carry out the requests of signals and the program; return the stops among them, oldest first."""
        stops = []
        for item in self._signals.inbox.drain():
            match item:
                case int():
                    stops.append(self._stops.of_signal(item, is_polled=self._listens()))
                case StopRequest():
                    stops += self._of_program(item)
                case StacksRequest(why):
                    # Without a reason, only the program gets the stacks, and the console shows
                    # none.
                    if why:
                        self._sink(records.StacksShown(why))
                    self._dump_stacks()
                case NoticeReceived(signum):
                    stops += self._take_notice(signal.Signals(signum))

        return stops

    def _of_program(self, request: StopRequest) -> list[_policy.StopRequested]:
        """Return the program's request to stop; none if it is kept for workers that ask later."""
        stop = _policy.StopRequested(
            signal.SIGTERM,
            request.why,
            request.grace,
            is_polled=self._listens(),
            is_notice=request.is_notice,
            ends_job=request.ends_job,
        )
        if not request.needs_listener:
            return [stop]
        return self._stops.pass_or_keep(stop, monotonic(), has_saved=self._state.saved)

    def _take_notice(self, signum: signal.Signals) -> list[_policy.StopRequested]:
        """Pass a signal on that ends nothing; return the request to stop if it announces the end of this node."""
        is_end = self._stops.announces_end(signum)
        is_polled = is_end and self._listens()
        # A worker that asks learns of it in `should_stop`, so that its own handler must not stop it
        # earlier.
        is_handled = not is_polled and self._pass_on(signum)
        if not is_end:
            return []
        return self._stops.of_announcement(signum, monotonic(), wall_time(), is_polled=is_polled, is_handled=is_handled)

    def _kept_request(self) -> list[_policy.StopRequested]:
        """Return the request that came before a worker asked whether it should stop, once one asks."""
        if self._stops.poll_timeout() is None:
            return []
        is_polled = self._state.phase is _policy.Phase.RUNNING and self._listens()
        return self._stops.release_kept(monotonic(), is_polled=is_polled, has_saved=self._state.saved)

    def _is_ending(self) -> bool:
        """Return whether the end of this node was announced."""
        stop = self._state.stop
        return stop is not None and stop.is_notice

    def _look(self) -> list[_policy.Event]:
        group = self._worker_group
        with self._telemetry.measured(self._monitor_workers):
            self._result = self._monitor_workers(group)
        for rank, failure in self._result.failures.items():
            # torch's failures, and so those of users' own agents, have no global rank.
            failure.rank = rank

        self._telemetry.seen(self._result)
        if self._result.state is WorkerState.HEALTHY:
            return []

        group.step(self._result.state, "_monitor_workers reported it")
        if self._result.state is WorkerState.SUCCEEDED:
            has_stopped = self._were_stopped() or self._state.noticed is not None
            return [_policy.WorkersSucceeded(has_stopped)]
        if not self._result.failures:
            return [_policy.WorkersFailed(f"workers are {group.state.value}")]

        rank, failure = root_cause(self._result.failures)
        return [_policy.WorkersFailed(failure.message if failure.process else f"rank {rank}: {failure.message}")]

    def _perform(self, action: _policy.Action) -> RunResult | None:
        group, member = self._worker_group, self._member
        match action:
            case _policy.AskForRanks():
                self._assigned = False
                # Ranks that have arrived already answer an earlier request, which is now obsolete.
                self._events = deque(event for event in self._events if not isinstance(event, RankAssignment))
                self._make_ready()
                self._telemetry.sought(member.node)
                member.join(group.spec.local_world_size, group.spec.role)
            case _policy.Start(assignment):
                self._telemetry.assigned(assignment)
                with self._telemetry.ranking():
                    self._take_ranks(assignment)
                self._begin(assignment)
            case (
                _policy.WantStop() | _policy.AwaitReturn() | _policy.AskWorkers() | _policy.Propose() | _policy.Agree()
            ):
                self._perform_common_stop(action)
            case _policy.StopWorkers():
                self._perform_stop(action)
            case _policy.ReportFailed(number):
                member.post(Failed(member.node, number, notes(self._failures().values())))
            case _policy.ReportStopped(number):
                failures = self._failures()
                member.post(Stopped(member.node, number, notes(failures.values())))
                self._telemetry.stopped(failures)
            case _policy.ReportSucceeded(number):
                member.post(Succeeded(member.node, number))
            case _policy.LeaveJob() | _policy.CloseJob():
                with contextlib.suppress(RendezvousClosedError):
                    self._perform_leave(action)
            case _policy.Finish():
                return self._finish(action)
            case _:
                assert_never(action)

        return None

    def _perform_stop(self, action: _policy.StopWorkers) -> None:
        if action.spares:
            self._spare_savers()
        self._stop(action.why, action.signum, action.grace)
        # A loss of contact since then explains why workers were killed: handle it first.
        # The error is raised again at the next wait.
        with contextlib.suppress(RendezvousError):
            self._listen()

        has_succeeded = self._result.state is WorkerState.SUCCEEDED
        has_saved = self._is_ending() and self._ended_well()
        self._events.append(_policy.WorkersGone(has_succeeded, has_saved))

    def _perform_leave(self, action: _policy.LeaveJob | _policy.CloseJob) -> None:
        member = self._member
        match action:
            case _policy.CloseJob(why):
                member.post(Close(member.node, why, stops=True))
            case _policy.LeaveJob(why, number):
                member.post(Leave(member.node, why, number, stops=action.ends_job))

    def _perform_common_stop(
        self,
        action: _policy.WantStop | _policy.AwaitReturn | _policy.AskWorkers | _policy.Propose | _policy.Agree,
    ) -> None:
        group, member = self._worker_group, self._member
        match action:
            case _policy.AwaitReturn(grace):
                self._await_return(self._shutdown_timeout if grace is None else grace)
            case _policy.WantStop(stop):
                left = self._shutdown_timeout if stop.grace is None else stop.grace
                self._begin_stop(signal.Signals(stop.signum), left)
                member.post(StopWanted(member.node, group.round, stop.why, left))
            case _policy.AskWorkers(request):
                self._sink(records.WorkersAsked(group.round, request.why, request.left))
                ranks = range(request.first_rank, request.first_rank + request.ranks)
                self._ask_workers(request.why, request.left, ranks)
            case _policy.Propose(call):
                self._propose(call)
            case _policy.Agree():
                self._agree()

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

    def _words(self) -> list[MembershipEvent]:
        """Return the new messages of the rendezvous; raise its error, at each call, if it broke."""
        if self._broken is None:
            try:
                return self._member.drain()
            except RendezvousError as error:
                self._broken = error
        raise self._broken

    def _listen(self) -> bool:
        """Queue the new messages of the rendezvous; return whether contact is lost."""
        self._events.extend(self._words())
        return any(isinstance(event, ContactLost) for event in self._events)

    def _begin(self, assignment: RankAssignment) -> None:
        if self._listen():
            # This process was stopped, and other nodes may have the ranks by now.
            return

        self._runs, group = True, self._worker_group
        try:
            with self._telemetry.measured(self._start_workers):
                ids = self._start_workers(group)
        except StartError:
            if self._listen():
                # It was stopped until its spawner was killed: the lost contact is the cause.
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
        self._grace = self._shutdown_timeout
        if grace is not None:
            # A request has its own time, also a longer one. A loss of contact only shortens the time.
            self._grace = grace if signum is not None else min(grace, self._shutdown_timeout)

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

        # After a stop of this node its workers have not failed: they stay STOPPED.
        if end.stop is None:
            self._worker_group.step(WorkerState.FAILED, end.why)
        own = self._failures() if self._assigned else {}
        error = error_of(end, self._result.return_values, own)
        if error is not None:
            raise error

        failures = agreed(own, end.final, self._member.node)
        workers_failed = self._assigned and self._result.state in _NOT_WELL
        if not failures and not workers_failed:
            # For example, a node was lost too often.
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
