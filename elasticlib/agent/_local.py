"""
The agent whose workers are processes of this machine: functions, scripts, modules or programs.

Rules of this file: it wakes up when a worker ends, not to look whether one did; whatever ends a round,
the log files are read to their last byte before anything is reported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from elasticlib import records
from elasticlib._wire import HasDescriptor, Message, wait_readable
from elasticlib.agent import _policy
from elasticlib.agent._agent import DEFAULT_ROLE, SimpleElasticAgent
from elasticlib.errors import (
    ConfigError,
    ElasticError,
    PicklingError,
    PreloadError,
    ProcessFailure,
    RendezvousError,
    StartError,
)
from elasticlib.logs._console import console_sink
from elasticlib.logs._layout import DEFAULT_PREFIX, line_prefix
from elasticlib.logs._tee import Tee
from elasticlib.rendezvous._messages import ContactLost
from elasticlib.spec import (
    DEFAULT_PRELOAD,
    DEFAULT_SIGNALS,
    START_METHODS,
    LogsDest,
    LogsSpecs,
    StartMethod,
    Std,
    WorkerSpec,
)
from elasticlib.state import RunResult, WorkerGroup, WorkerState
from elasticlib.workers import _env, _failure, _machine, _order
from elasticlib.workers._process import Crew, Exit, Lost, Stopped
from elasticlib.workers._templates import templates

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_CONSOLE_PATIENCE = 0.2
"""Seconds between two looks for a signal while the console takes no more lines."""
PRIVATE_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class LocalElasticAgent(SimpleElasticAgent):
    """
    Runs the workers of *spec* as processes of this machine.

    (torch: ``torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent``.) The call is
    checked here: raises `ConfigError` and its kinds before anything is started. *log_line_prefix_template*
    beats the environment's ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: StartMethod = "forkserver",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        *,
        signals_to_handle: str = DEFAULT_SIGNALS,
        sink: records.Sink = records.log,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, signals_to_handle=signals_to_handle, sink=sink)
        if start_method not in START_METHODS:
            raise ConfigError(f"start_method={start_method!r} is none of {', '.join(START_METHODS)}")
        caller = dict(os.environ)
        cpus = _machine.cpus()
        threads = _env.threads_per_worker(caller, cpus, spec.local_world_size)
        if _env.THREADS not in caller:
            sink(records.ThreadsChosen(threads, cpus, spec.local_world_size))
        environment = _env.common_variables(caller, threads, signals_to_handle)
        self._agent_store = caller.get(PRIVATE_STORE_VARIABLE) != "1"
        self._prefix = log_line_prefix_template or caller.get(PREFIX_VARIABLE) or DEFAULT_PREFIX
        self._job = _order.plan(spec, start_method, environment, threads)
        self._logs_specs = logs_specs
        self._dest = LogsDest()
        self._crew: Crew | None = None
        self._exits: dict[int, Exit] = {}
        self._noticed: dict[int, float] = {}
        self._stopped = False
        self._lost: Lost | None = None
        self._memory_kills = 0
        self._tee = Tee(console_sink(sys.stdout), console_sink(sys.stderr))

    def original_exception(self, rank: int) -> BaseException | None:
        """The exception of the worker with global rank *rank* in the last round, where it can be rebuilt."""
        local = rank - self._worker_group.workers[0].global_rank
        end = self._exits.get(local)
        if local not in range(len(self._worker_group.workers)):
            return None  # it ran on another node
        if end is None:
            return self._lost.cause if self._lost is not None else None
        return _failure.original_exception(end)

    # The hooks.

    def _watched(self) -> Sequence[HasDescriptor]:
        return () if self._crew is None or self._crew.fileno() < 0 else (self._crew,)

    def _patience(self) -> float | None:
        return None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._exits.clear()
        self._noticed.clear()
        self._stopped, self._lost = False, None
        self._memory_kills = _machine.memory_kills()
        # Rank 0 without a socket: the rendezvous' own store has the port, and no worker could bind it.
        agent_store = self._agent_store or (worker_group.group_rank == 0 and self._listener is None)
        orders = self._orders(worker_group, agent_store)
        if not agent_store:
            self._close_listener()  # worker 0 will bind this port
        listener = self._listener
        number = None if listener is None else listener.fileno()
        crew = self._crew = self._crew or self._hire()
        try:
            return self._start(worker_group, orders, number)
        except PreloadError as error:
            if (error.module,) != self._worker_group.spec.preload or error.module not in DEFAULT_PRELOAD:
                raise
            # Nobody asked for it: a job without torch, or one whose torch does not bear it, runs all the same.
            self._sink(records.PreloadSkipped(str(error)))
            self._job = _order.without_preload(self._job)
            return self._start(worker_group, orders, number)
        except StartError:
            if not (crew.started() or crew.was_warm()):
                raise
            # Template or foreman was killed while idle: nothing ran, so this costs no restart.
            return self._start(worker_group, orders, number)

    def _start(self, group: WorkerGroup, orders: list[Message], listener: int | None) -> dict[int, object]:
        if self._crew is None:
            self._crew = self._hire()
        try:
            interrupt = self._signals.fileno()
            foreman = self._crew.foreman(interrupt)
            if foreman is None:
                return {}
            self._member.guard(foreman)  # before there are workers: from then on this process may be stopped
            return dict(self._crew.start(group.round, orders, listener, interrupt))
        except ElasticError:
            self._dismiss()
            raise

    def _hire(self) -> Crew:
        crew = Crew({"common": self._job.common}, self._job.memories)
        if self._job.template is None:
            assert self._job.call is not None
            crew.fork_caller(self._job.call)
        else:
            crew.employ(templates.take(self._job.template, self._job.environment, self._job.search_path))
        return crew

    def _orders(self, group: WorkerGroup, agent_store: bool) -> list[Message]:
        spec, first = group.spec, group.workers[0]
        assert group.group_rank is not None and group.group_world_size is not None
        place = _env.Place(
            run_id=self._run_id,
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
        ranks = range(spec.local_world_size)
        self._dest = self._logs_specs.reify({rank: _env.worker_variables(place, rank, "") for rank in ranks})
        self._follow(group)
        return [self._order(place, rank) for rank in ranks]

    def _order(self, place: _env.Place, rank: int) -> Message:
        dest = self._dest
        return {
            "local_rank": rank,
            "argv": self._job.argv(rank),
            "env": _env.worker_variables(place, rank, dest.error_files.get(rank, "")),
            "stdout": dest.stdouts.get(rank),
            "stderr": dest.stderrs.get(rank),
        }

    def _follow(self, group: WorkerGroup) -> None:
        dest = self._dest
        for std, files in ((Std.OUT, dest.tee_stdouts), (Std.ERR, dest.tee_stderrs)):
            for rank, path in files.items():
                worker = group.workers[rank]
                prefix = line_prefix(self._prefix, role_name=group.spec.role, rank=worker.global_rank, local_rank=rank)
                self._tee.follow(path, prefix, std)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._take()
        ends = self._exits.values()
        if any(end.exitcode != 0 for end in ends):
            return RunResult(WorkerState.FAILED, {}, self._failures())
        if len(ends) == len(worker_group.workers) and (self._stopped or self._lost is not None):
            self._drain()
            return RunResult(WorkerState.SUCCEEDED, self._return_values())
        if self._lost is not None:
            return RunResult(WorkerState.FAILED, {}, self._failures())
        return RunResult(WorkerState.HEALTHY)

    def _take(self) -> None:
        if self._crew is None:
            return
        for event in self._crew.take():
            match event:
                case Exit():
                    self._exits[event.local_rank] = event
                    self._noticed[event.local_rank] = time.time()
                case Stopped(survivors):
                    self._stopped = True
                    if survivors:
                        self._sink(records.WorkersSurvived(tuple(survivors)))
                case Lost():
                    self._lost = self._lost or event  # the first one knows why

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._bring_down(signal.SIGTERM, self._grace)

    def _bring_down(self, signum: signal.Signals, grace: float) -> None:
        """Stop the workers by the foreman's ladder; another signal meanwhile means SIGKILL now."""
        self._take()
        crew = self._crew
        if crew is not None and crew.started() and self._lost is None and not self._stopped:
            crew.stop(signum, grace)
            deadline = time.monotonic() + grace
            while not self._stopped and self._lost is None:
                deadline = self._watch_stop(crew, signum, deadline)
        elif crew is not None and not crew.started():
            self._dismiss()  # a signal came before the template was ready
        if self._lost is not None:
            self._dismiss()
        self._drain()

    def _watch_stop(self, crew: Crew, signum: signal.Signals, deadline: float) -> float:
        """Wait for the workers' end, or for a reason to hurry; when they will be killed."""
        hears = self._broken is None
        watched: list[HasDescriptor] = [self._signals, crew, *([self._member] if hears else [])]
        wait_readable(watched, self._member.patience() if hears else None)
        for came in self._signals.take():
            self._events.append(_policy.StopRequested(came))
            deadline = 0.0
            crew.stop(signal.SIGKILL, 0.0)
        with contextlib.suppress(RendezvousError):
            if self._listen():
                grace = min(event.grace for event in self._events if isinstance(event, ContactLost))
                if time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    crew.stop(signum, grace)
        self._take()
        return deadline

    def _drain(self) -> None:
        dest = self._dest
        self._tee.drain_and_forget([*dest.tee_stdouts.values(), *dest.tee_stderrs.values()])

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        try:
            if WorkerState.is_running(self._worker_group.state):
                self._bring_down(death_sig, timeout)
        finally:
            self._dismiss()
        while not self._tee.finish(_CONSOLE_PATIENCE):
            if self._signals.take():
                break  # nobody reads the console, and the operator will not wait for it

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """As `SimpleElasticAgent.run`; when it returns, no process is left and the console has all lines."""
        self._tee = Tee(console_sink(sys.stdout), console_sink(sys.stderr))
        return super().run(role)

    def _dismiss(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    # What the workers left behind.

    def _failures(self) -> dict[int, ProcessFailure]:
        base = self._worker_group.workers[0].global_rank
        kills = _machine.memory_kills() - self._memory_kills
        found = {}
        for rank, end in sorted(self._exits.items()):
            if _failure.failed(end):
                error_file, stderr = self._dest.error_files.get(rank, ""), self._dest.stderrs.get(rank)
                noticed = self._noticed[rank]
                found[base + rank] = _failure.failure_of(end, base + rank, error_file, stderr, kills, noticed)
        # Killed because contact was lost, workers have not failed.
        if not found and self._lost is not None and not self._fenced:
            for worker in self._worker_group.workers:
                pid = worker.id if isinstance(worker.id, int) else 0
                found[worker.global_rank] = ProcessFailure(
                    worker.local_rank, pid, -signal.SIGKILL, "", message=self._lost.why, rank=worker.global_rank
                )
        return found

    def _return_values(self) -> dict[int, Any]:
        values: dict[int, Any] = {}
        for worker in self._worker_group.workers:
            report = self._exits[worker.local_rank].report
            values[worker.global_rank] = None
            if report is not None and report.kind == "result":
                try:
                    values[worker.global_rank] = pickle.loads(report.payload)
                except Exception as error:
                    raise PicklingError(
                        f"the return value of rank {worker.global_rank} cannot be rebuilt here: "
                        f"{type(error).__name__}: {error}"
                    ) from error
        return values
