"""
The agent whose workers are processes of this machine: functions, scripts, modules or programs.

Rules of this file: a worker's end wakes the agent up; it does not poll. However a round ends, the
log files are read to their last byte before anything is reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterable, Sequence

from elasticlib import _rules, metrics, processes, records
from elasticlib._clock import monotonic, wall_time
from elasticlib._times import soonest
from elasticlib.agent import _checks
from elasticlib.agent._agent import DEFAULT_ROLE, SimpleElasticAgent
from elasticlib.agent._agreed_stop import AgreedStop
from elasticlib.agent._end_notice import EndNotice
from elasticlib.agent._gpu_memory import GpuMemory
from elasticlib.agent._health import HealthCheckServer
from elasticlib.agent._policy import StopDue
from elasticlib.agent._repeats import Repeats
from elasticlib.agent._worker_watch import Sockets, Watch
from elasticlib.errors import ProcessFailure, RendezvousError, StartError
from elasticlib.logs import DEFAULT_PREFIX, PREFIX_VARIABLE, Console, Duplicates, LogRounds, line_prefix
from elasticlib.processes import Waitable, wait_readable
from elasticlib.rendezvous import Rendezvous, host_name
from elasticlib.rendezvous.handlers import NO_SHARING
from elasticlib.rendezvous.protocol import ContactLost
from elasticlib.spec import DEFAULT_SIGNALS, LogsSpecs, StartMethod, WorkerSpec
from elasticlib.state import RunResult, WorkerGroup, WorkerState
from elasticlib.workers import (
    THREADS_VARIABLE,
    Inbox,
    NodePlace,
    Preparation,
    Processes,
    WorkerNow,
    fork_servers,
    ignoring,
    prepare_workers,
    with_descriptors,
    worker_variables,
)
from elasticlib.workers.child import StopBoard

_CONSOLE_TIMEOUT = 0.2
"""Seconds between two checks for a signal while the console blocks."""
_CONSOLE = (1, 2)
"""Descriptors of this program's stdout and stderr."""
_STACKS_LIMIT = 3.0
"""Seconds that a stop waits for the workers' stacks."""
_LONG_SILENCE = 20.0
"""Seconds without output after which an interrupt shows the workers' stacks."""
_TERMINAL_IS_BEHIND = 8.0
"""Maximum delay in seconds of a terminal's modification time, which the kernel rarely updates."""


class LocalElasticAgent(SimpleElasticAgent):
    """
    Agent that runs the workers of *spec* as processes of this machine.

    (torch: ``torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent``.)
    Invalid arguments raise `ConfigError` or a subclass here, before anything is started.
    *log_line_prefix_template* takes precedence over ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``.

    With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` in this environment it runs a watchdog
    (`elasticlib.timer`), whose path workers get in ``TORCHELASTIC_TIMER_FILE``. With
    ``TORCHELASTIC_HEALTH_CHECK_PORT`` it answers health checks over HTTP on that port. A
    *health_check_server* that the caller has started takes that one's place, and is stopped with
    the run.

    A worker that is in uninterruptible sleep (state D) at every check for
    *uninterruptible_state_timeout* seconds ends the job without a restart. None takes
    ``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT``; 0 turns the check off.

    *prepared* is the result of `prepare_workers` for the same spec, start method and signals, if it
    was called before the rendezvous. Without *repeats_errors*, an exception that a restart would
    only repeat ends the job; see `Repeats`. *console* gets the tee'd lines instead of this
    program's stdout and stderr. With *interrupt_shows_stacks*, workers that have written nothing
    for `_LONG_SILENCE` seconds show their stacks before an interrupt (SIGINT) stops them.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: StartMethod = "forkserver",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        signals_to_handle: str = DEFAULT_SIGNALS,
        sink: records.Sink = records.log,
        metric_handler: metrics.MetricHandler | None = None,
        prepared: Preparation | None = None,
        inbox: Inbox | None = None,
        end_notice: EndNotice | None = None,
        repeats_errors: bool = True,
        console: Console | None = None,
        interrupt_shows_stacks: bool = False,
    ) -> None:
        _rules.check_logs_specs(logs_specs)
        _rules.check_shutdown_timeout(shutdown_timeout)
        _checks.check_health_check_server(health_check_server)
        _checks.check_local(log_line_prefix_template, uninterruptible_state_timeout)
        made = prepared if prepared is not None else prepare_workers(spec, start_method, signals_to_handle)
        super().__init__(
            spec,
            exit_barrier_timeout,
            shutdown_timeout,
            signals_to_handle=made.signals_to_handle,
            sink=sink,
            metric_handler=metric_handler,
            inbox=inbox,
            end_notice=end_notice,
        )
        caller = made.caller
        if THREADS_VARIABLE not in caller:
            sink(records.ThreadsChosen(made.job.common.threads, made.cpus, spec.local_world_size))
        if processes.pidfds.why() or processes.memfds.why():
            sink(records.KernelLimited(processes.pidfds.why(), processes.memfds.why()))
        self._agent_store = caller.get(NO_SHARING) != "1"
        prefix = log_line_prefix_template or caller.get(PREFIX_VARIABLE)
        self._prefix = prefix if prefix else str(getattr(logs_specs, "default_prefix", DEFAULT_PREFIX))
        # A scheduler sends a notice to all processes of a node, also to workers that have not asked yet for a stop.
        # SIGTERM also stops workers: if they ignored it, each stop would take until SIGKILL.
        notices = self._stops.notice.signals - {signal.SIGTERM}
        self._job = ignoring(made.job, notices) if notices else made.job
        if isinstance(spec.rdzv_handler, Rendezvous) and spec.rdzv_handler.descriptors:
            self._job = with_descriptors(self._job, spec.rdzv_handler.descriptors)
        self._logs = LogRounds(logs_specs)
        duplicates = Duplicates(spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
        self._processes = Processes(self._job, spec.local_world_size, sink, duplicates, console)

        self._watch = Watch(
            caller,
            self._run_id,
            self._sink,
            health_check_server=health_check_server,
            uninterruptible_state_timeout=uninterruptible_state_timeout,
        )
        self._sockets = Sockets(spec.worker_server)
        self._repeats = None if repeats_errors else Repeats()
        self._interrupt_shows_stacks = interrupt_shows_stacks
        self._began = 0.0
        """Unix time of the last start of workers."""
        self._gpu_memory = GpuMemory(self._job.common.env, self._sink)
        self._agreed_stop: AgreedStop | None = None
        """The request to the workers of this round to stop at a step of their own."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """
        Run the workers; see `SimpleElasticAgent.run`.

        When it returns, no process, pipe or socket of the run is left. After a success, the logs of
        `DefaultLogsSpecs` in a temporary folder are removed too, unless it redirects streams to
        files.
        """
        job = self._job
        try:
            self._watch.open()
            if (folder := self._sockets.open()) is not None:
                self._sink(records.WorkerServersPlaced(folder))
            self._gpu_memory.open()

            # The fork server imports torch while the nodes meet.
            with fork_servers.warming(job.fork_server, job.common.env, job.search_path):
                result = super().run(role)
            if not result.is_failed():
                self._logs.put_away()
            return result
        finally:
            if (advice := self._processes.imports.advice()) is not None:
                self._sink(advice)
            self._watch.close()
            self._sockets.close()
            self._gpu_memory.close()
            self._logs.forget_unused()

    def original_exception(self, rank: int) -> BaseException | None:
        """Return the exception of global rank *rank* in the last round; None if unavailable."""
        local = rank - self._worker_group.workers[0].global_rank
        if local not in range(len(self._worker_group.workers)):
            # That worker ran on another node.
            return None
        return self._processes.round.original_exception(local)

    def workers_now(self) -> list[WorkerNow]:
        """Return the state of this node's workers by local rank; any thread may call it."""
        return [self._processes.now(rank) for rank in range(self._worker_group.spec.local_world_size)]

    # The hooks.

    def _make_ready(self) -> None:
        handler = self._worker_group.spec.rdzv_handler
        # Alone, the node disturbs no others, and a full disk gives a better error from the workers.
        if not (isinstance(handler, Rendezvous) and handler.alone):
            self._logs.make_ready(self._run_id)

    def _watched(self) -> Sequence[Waitable]:
        return () if self._processes.fileno() < 0 else (self._processes,)

    def _poll_timeout(self) -> float | None:
        interval = self._worker_group.spec.monitor_interval
        return soonest(self._watch.poll_timeout(interval), self._processes.poll_timeout())

    def _stop_timeout(self) -> float | None:
        return None if self._agreed_stop is None else self._agreed_stop.poll_timeout(monotonic())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._agreed_stop = None
        self._end_detached()

        # The round's files and the workers' variables.
        agent_store = self._hosts_store(worker_group)
        place = _place_of(worker_group, self._run_id, agent_store=agent_store)
        ranks = range(worker_group.spec.local_world_size)
        envs = {rank: self._job.environment_of(rank, worker_variables(place, rank, "")) for rank in ranks}
        dest = self._logs.reify(envs)
        watched = self._watch.start()
        specs = [self._sockets.serving(self._job.spec(rank, envs[rank] | watched)) for rank in ranks]

        # Worker 0 will bind this port.
        if not agent_store:
            self._close_listener()

        self._await_gpu_memory()

        self._began = wall_time()
        if self._repeats is not None:
            self._repeats.begin(worker_group.round, self._began)
        return dict(
            self._processes.start(
                worker_group.round,
                specs,
                dest,
                _line_prefixes(worker_group, self._prefix),
                listener=None if self._listener is None else self._listener.fileno(),
                interrupt=self._signals.hurry(),
                # From then on the workers end even if this process is stopped.
                guard=self._member.guard,
                rank_base=worker_group.workers[0].global_rank,
                world_size=worker_group.workers[0].world_size,
            )
        )

    def _hosts_store(self, group: WorkerGroup) -> bool:
        """Return whether the agent of the node with group rank 0 hosts the workers' store, instead of worker 0."""
        # The user's own master address is not that of the agent's store: worker 0 opens one there.
        if self._has_other_master:
            return False

        # Rank 0 has no socket: the store of the rendezvous has the port, and no worker can bind it.
        port_is_taken = group.group_rank == 0 and self._listener is None
        return self._agent_store or port_is_taken

    def _end_detached(self) -> None:
        """End processes that successful workers have detached, as their round failed elsewhere."""
        if self._processes.round.all_succeeded():
            self._processes.stop(signal.SIGTERM, 0.0, spare_failed=True)

    def _await_gpu_memory(self) -> None:
        """Wait until the earlier workers' GPU memory is free, or until something urgent comes."""
        memory, known = self._gpu_memory, len(self._events)
        memory.begin()
        while (left := memory.look()) is not None:
            watched: list[int | Waitable] = [self._signals.hurry(), self._member, memory]
            if self._signals.hurry() in wait_readable(watched, soonest(left, self._member.poll_timeout())):
                # The start that follows checks the same descriptor.
                return
            if self._listen():
                # Other nodes may have these ranks by now.
                raise StartError("contact was lost")
            if len(self._events) > known:
                return

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._processes.poll()
        present = self._processes.round

        # No worker is checked until the next round: to the health check this must not look like a hang.
        if present.any_failed() or present.gone():
            self._watch.rest()
        if present.all_succeeded():
            self._processes.drain()
            return RunResult(WorkerState.SUCCEEDED, present.return_values(worker_group.workers[0].global_rank))

        if present.any_failed() or present.lost is not None:
            return RunResult(WorkerState.FAILED, {}, self._failures())

        running = list(present.running().values())
        is_stuck = self._watch.look(running)
        if is_stuck:
            return RunResult(WorkerState.UNHEALTHY, {}, self._failures())

        return RunResult(WorkerState.HEALTHY)

    def _serves_others(self) -> bool:
        return self._processes.round.serves_others()

    def _finds_store_lost(self) -> bool:
        self._processes.poll()
        return self._processes.round.lost_store_of_others()

    def _dump_stacks(self) -> None:
        self._processes.ask_for_stacks()

    def _pass_on(self, signum: signal.Signals) -> bool:
        return self._processes.pass_on(signum)

    def _await_return(self, grace: float) -> None:
        if (board := self._processes.stop_board) is not None:
            self._common_stop(board, grace)

    def _listens(self) -> bool:
        from elasticlib.rendezvous.third_party import HandlerMember

        # Nodes that meet by another project's handler have no coordinator to agree by.
        board = self._processes.stop_board
        has_coordinator = not isinstance(self._member, HandlerMember)
        return has_coordinator and board is not None and bool(board.listeners())

    def _begin_stop(self, signum: signal.Signals, grace: float) -> None:
        board = self._processes.stop_board
        assert board is not None
        self._common_stop(board, grace)
        # The others save in their own handler, if they have one. Python's own for SIGINT saves nothing.
        if signum != signal.SIGINT:
            self._processes.pass_on(signum, spared=board.listeners())

    def _ask_workers(self, why: str, grace: float, ranks: range) -> None:
        board = self._processes.stop_board
        if board is None:
            return
        self._common_stop(board, grace).ask(why, wall_time() + grace, ranks, monotonic())

    def _common_stop(self, board: StopBoard, grace: float) -> AgreedStop:
        """Return the stop of this round's workers: one, also where this node and others must end, in the least time."""
        if self._agreed_stop is None:
            self._agreed_stop = AgreedStop.begin(board, grace, monotonic())
        else:
            self._agreed_stop.shorten(grace, monotonic())
        return self._agreed_stop

    def _counted_calls(self) -> tuple[int, float, int] | None:
        return None if self._agreed_stop is None else self._agreed_stop.counted(monotonic())

    def _propose(self, call: int) -> None:
        if self._agreed_stop is not None:
            self._agreed_stop.propose(call, monotonic())

    def _agree(self) -> None:
        if self._agreed_stop is not None:
            self._agreed_stop.agree(monotonic())

    def _spare_savers(self) -> None:
        if (board := self._processes.stop_board) is not None:
            board.spare()

    def _stop_due(self) -> StopDue | None:
        stop = self._agreed_stop
        if stop is None or not stop.falls_due(monotonic()):
            return None
        if not stop.is_requested:
            # A later request has a time of its own.
            self._agreed_stop = None
        return StopDue(stop.grace)

    def _were_stopped(self) -> bool:
        return self._agreed_stop is not None and self._agreed_stop.were_stopped()

    def _ended_well(self) -> bool:
        return self._processes.round.all_ended_with_zero()

    def _failures(self) -> dict[int, ProcessFailure]:
        # Workers that were killed because contact was lost have not failed.
        found = self._processes.round.failures(self._worker_group.workers[0].global_rank, by_loss=not self._state.lost)
        pids, workers = self._processes.round.pids, self._worker_group.workers
        found = self._watch.explained(found, {each.global_rank: pids.get(each.local_rank, 0) for each in workers})
        if self._repeats is not None:
            steps = [each.progress.step for each in self.workers_now() if each.progress is not None]
            self._repeats.marked(found, max(steps, default=None))
        return found

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # After a success, processes that workers detached live as long as that success counts.
        if not self._processes.round.all_succeeded():
            self._stop_processes(signal.SIGTERM, self._grace, spare_failed=True)
        # All had succeeded before the stop reached one of them: the round has results.
        present = self._processes.round
        if present.all_succeeded() and not any(end.was_stopped for end in present.exits.values()):
            self._result = self._monitor_workers(worker_group)
            self._telemetry.seen(self._result)

    def _stop_processes(
        self, signum: signal.Signals, grace: float, *, spare_failed: bool = False, somebody_waits: bool = False
    ) -> None:
        """Stop the workers; a SIGINT meanwhile kills them, lost contact shortens the grace."""
        self._watch.rest()
        self._processes.stop(
            signum,
            grace,
            lambda limit: self._watch_stop(signum, limit),
            somebody_waits=somebody_waits,
            spare_failed=spare_failed,
        )

    def _watch_stop(self, signum: signal.Signals, limit: float | None) -> None:
        """Wait for the workers' end or a reason to stop them faster, for at most *limit* s."""
        is_connected = self._broken is None
        watched: list[Waitable] = [self._signals, self._processes, *([self._member] if is_connected else [])]
        wait_readable(watched, soonest(limit, self._member.poll_timeout() if is_connected else None))
        for stop in self._requests():
            self._events.append(stop)
            # A user who repeats SIGINT wants an end now; schedulers repeat other signals routinely.
            is_repeated_interrupt = not stop.reason and stop.signum == signal.SIGINT
            if is_repeated_interrupt:
                self._processes.hasten(signal.SIGKILL, 0.0)
            elif stop.grace is not None:
                self._processes.hasten(signum, stop.grace)
            else:
                self._sink(records.StopRepeated(stop.why, self._processes.grace_left()))

        with contextlib.suppress(RendezvousError):
            if self._listen():
                grace = min(event.grace for event in self._events if isinstance(event, ContactLost))
                self._processes.hasten(signum, grace)

    def _show_stacks_after_silence(self) -> None:
        """Let workers that were silent for long show their stacks; a signal ends the wait."""
        paths = [path for worker in self.workers_now() for path in (worker.stdout, worker.stderr) if path]

        # Workers without files write to this program's own stdout and stderr.
        silence = silent_for(wall_time(), self._began, [*_CONSOLE, *paths])
        if silence >= _LONG_SILENCE:
            self._sink(records.StacksShown(f"nothing was written for {silence:.0f} s: stacks of all ranks"))
            self._processes.ask_for_stacks()
            _await_stacks(self._processes, self._signals.hurry())

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        try:
            if WorkerState.is_running(self._worker_group.state):
                if death_sig == signal.SIGINT and self._interrupt_shows_stacks:
                    self._show_stacks_after_silence()
                self._stop_processes(death_sig, timeout, somebody_waits=True)
            elif self._worker_group.state is WorkerState.FAILED:
                self._end_detached()
        finally:
            self._processes.dismiss()

        # If the console blocks, the operator must not wait for it.
        self._processes.finish(_CONSOLE_TIMEOUT, self._signals.drain)


def _place_of(group: WorkerGroup, run_id: str, *, agent_store: bool) -> NodePlace:
    """Return the place of this node's workers in the round of *group*, for their variables."""
    spec, first = group.spec, group.workers[0]
    assert group.group_rank is not None and group.group_world_size is not None
    return NodePlace(
        run_id=run_id,
        role=spec.role,
        local_world_size=spec.local_world_size,
        group_rank=group.group_rank,
        group_world_size=group.group_world_size,
        rank_base=first.global_rank,
        world_size=first.world_size,
        role_rank_base=first.role_rank,
        role_world_size=first.role_world_size,
        restart_count=group.restart_count,
        max_restarts=spec.max_restarts,
        master_addr=group.master_addr or "",
        master_port=group.master_port or 0,
        agent_store=agent_store,
    )


def _line_prefixes(group: WorkerGroup, template: str) -> dict[int, bytes]:
    """Return the prefix of each worker's lines on the console, by local rank."""
    return {
        worker.local_rank: line_prefix(
            template,
            role_name=group.spec.role,
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            hostname=host_name(),
        )
        for worker in group.workers
    }


def _await_stacks(workers: Processes, signal_arrives: int) -> None:
    """Wait until the *workers* have shown their stacks, up to `_STACKS_LIMIT`, or until a signal arrives."""
    deadline = monotonic() + _STACKS_LIMIT
    while workers.awaits_stacks and workers.fileno() >= 0:
        left = deadline - monotonic()
        if left <= 0:
            return
        ready = wait_readable([signal_arrives, workers], left)
        if signal_arrives in ready:
            return
        workers.poll()


def silent_for(now: float, began: float, files: Iterable[int | str]) -> float:
    """Return the seconds at the Unix time *now* since any of *files* was written to, or since *began*."""
    return max(0.0, now - max([began, *map(_written, files)]))


def _written(file: int | str) -> float:
    """Return the Unix time of *file*'s last write, or a later one; 0 if it is closed or gone."""
    # The kernel keeps this time for terminals, pipes and files, so the job need not count lines.
    try:
        status = os.stat(file)
    except OSError:
        return 0.0
    return status.st_mtime + (_TERMINAL_IS_BEHIND if stat.S_ISCHR(status.st_mode) else 0.0)
