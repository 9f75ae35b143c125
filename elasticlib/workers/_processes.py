"""
The worker processes of one launch on this machine, round after round, with their logs.

`LocalRound` knows what the events of a round say about its workers. `SpawnerSupervisor` has the
spawner that starts them. `Processes` starts, watches and stops them.

Rules of this file: ranks are local ones, except in failures and return values, which get
*rank_base* added. It decides nothing, and waits for the workers only. A caller that must be
interrupted passes a descriptor, or waits without this class. At the end of a round, the log files
are read to their last byte before anything is reported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from signal import SIGKILL, SIGTERM
from typing import Any

from attrs import Factory, define

from elasticlib import records
from elasticlib._clock import monotonic, wall_time
from elasticlib._times import Term, soonest
from elasticlib.errors import ElasticError, PreloadError, ProcessFailure, StartError
from elasticlib.helpers import HelperWatch
from elasticlib.logs import (
    Console,
    Duplicates,
    Tee,
    console_sink,
    destinations_of,
    follow_streams,
    full_folders,
    prepare_streams,
)
from elasticlib.preload import ImportWatch
from elasticlib.processes import (
    KILL_SECONDS,
    HelperLostError,
    catches,
    room_for_descriptors,
    wait_readable,
    wait_until_gone,
)
from elasticlib.spec import LogsDest
from elasticlib.workers import _failure, _launch_events as events, _machine, _plan
from elasticlib.workers._fork_servers import fork_servers
from elasticlib.workers._launch import SpawnerClient
from elasticlib.workers.child._should_stop import StopBoard
from elasticlib.workers.child._start_spec import StartSpec
from elasticlib.workers.child._worker_progress import Board

_ANSWER = 15.0
"""
Seconds beyond a shutdown's own time in which it must be done: two waits for kills, and some for a
slow machine.
"""
_DESCRIPTORS = 32, 8
"""Upper bounds of the descriptors that a round needs, and that each worker needs."""
_MOST_LOST = 3
"""Number of helpers that one start may lose."""
_AT_ONCE = 0.5
"""Seconds within which an end needs no explanation."""


# The facts of one round: this part starts, signals and waits for nothing.


@define(eq=False)
class LocalRound:
    """
    The *count* workers of a round.

    Each of them runs, or is in `exits`. One whose program has failed is in `failed` too, before
    its process ends. All are gone once the spawner says so, or is lost itself; then no more events
    come.
    """

    count: int
    dest: LogsDest = Factory(LogsDest)
    rank_base: int = 0
    world_size: int = 0
    has_store: bool = False
    """True if this node got the socket of the round's store."""
    memory_kills: int = 0
    """Number of out-of-memory kills in this cgroup before the round."""
    pids: dict[int, int] = Factory(dict)
    exits: dict[int, events.Exit] = Factory(dict)
    failed: dict[int, events.Exit] = Factory(dict)
    """Facts on workers whose programs failed."""
    noticed: dict[int, float] = Factory(dict)
    """Unix time at which the end or failure of a worker was noticed."""
    is_stopped: bool = False
    """True if the spawner has reported that no process is left."""
    lost: events.SpawnerLost | None = None
    """The reason why all workers are gone at once."""
    store: events.RoundStoreEnded | None = None
    """The end of the round's store."""
    store_gone_at: float = 0.0

    def note(self, event: events.Event) -> None:
        """Note an *event* of this round, if it concerns the ends of its workers."""
        match event:
            case events.Exit():
                self.exits[event.local_rank] = event
                self.noticed.setdefault(event.local_rank, wall_time())
            case events.ProgramFailed(end):
                self.failed[end.local_rank] = end
                self.noticed[end.local_rank] = wall_time()
            case events.AllStopped():
                self.is_stopped = True
            case events.RoundStoreEnded():
                if self.store is None:
                    self.store = event
                self.store_gone_at = wall_time()
            case events.SpawnerLost():
                # The first loss is the reason of the later ones.
                if self.lost is None:
                    self.lost = event

    def running(self) -> dict[int, int]:
        """Return the process ids of the workers that have not ended, by local rank."""
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.exits}

    def ends(self) -> dict[int, events.Exit]:
        """Return the present or coming ends of workers, by what is known now."""
        return {**self.failed, **self.exits}

    def gone(self) -> bool:
        """Return True if no worker, nor a process that one started, is left."""
        return self.is_stopped or self.lost is not None

    def any_failed(self) -> bool:
        """Return True if a worker has failed, or all have lost their common store."""
        has_lost_store = self.store is not None and self.store.was_needed
        return has_lost_store or any(end.exitcode != 0 for end in self.ends().values())

    def all_succeeded(self) -> bool:
        """Return True if all workers have ended well, and no process that they started is left."""
        have_all_ended = len(self.exits) == self.count
        return have_all_ended and not self.any_failed() and self.gone()

    def all_ended_with_zero(self) -> bool:
        """Return True if all workers have ended with status 0, whatever stop reached them before."""
        return len(self.exits) == self.count and all(end.exitcode == 0 for end in self.exits.values())

    def may_leave_processes(self, *, spare_failed: bool) -> bool:
        """Return True if a stop, with *spare_failed* or without, may find processes to end."""
        if not self.gone():
            return True
        # After a success with *spare_failed* there may be detached processes, which end now.
        return spare_failed and self.all_succeeded()

    def now(self, local_rank: int, board: Board | None) -> events.WorkerNow:
        """Return the state of the worker *local_rank*, which reports its progress to *board*."""
        progress = None if board is None else board.read(local_rank)
        stdout = self.dest.stdouts.get(local_rank, "")
        stderr = self.dest.stderrs.get(local_rank, "")
        pid, end = self.pids.get(local_rank, 0), self.ends().get(local_rank)
        return events.WorkerNow.of(local_rank, pid, end, progress, stdout, stderr)

    def serves_others(self) -> bool:
        """Return True if this node has the store of this round, and workers of other nodes use it too."""
        return self.has_store and self.world_size > self.count

    def hosts_for_others(self) -> bool:
        """Return True if workers of other nodes use the store of this node, which lives."""
        return self.serves_others() and not self._store_is_gone()

    def lost_store_of_others(self) -> bool:
        """Return True if workers of other nodes lost the store after all workers here had ended well."""
        return self._store_is_gone() and self.serves_others() and self.all_succeeded()

    def _store_is_gone(self) -> bool:
        """Return True if the store's process ended, or the spawner that hosts it."""
        return self.store is not None or self.lost is not None

    # Results of the workers.

    def failures(self, rank_base: int = 0, *, by_loss: bool = True) -> dict[int, ProcessFailure]:
        """
        Return the failures of the workers that failed on their own, by local rank plus
        *rank_base*.

        If all were lost at once, and none had failed before, that failed them all, unless
        *by_loss* is False.
        """
        with room_for_descriptors(1):
            kills = _machine.memory_kills() - self.memory_kills
            found = _failure.failures_of(self.ends(), self.dest, kills, self.noticed, rank_base)

        if not found and self.lost is not None and by_loss:
            # If all had ended well, the spawner alone was lost.
            lost = 1 if self.all_succeeded() else self.count
            found = _failure.lost_all(lost, rank_base, self.pids, self.lost.why)

        store = self._missed_store()
        if store is None:
            return found

        blamed = _failure.blamed(self.ends(), self.count)
        if blamed is not None:
            found[rank_base + blamed] = _failure.lost_store(store, blamed, rank_base, kills, self.store_gone_at)
        return found

    def _missed_store(self) -> events.RoundStoreEnded | None:
        """Return the end of the round's store, if workers of this node or of others needed it."""
        store = self.store
        if store is None:
            return None
        was_needed = store.was_needed or self.lost_store_of_others()
        return store if was_needed else None

    def cut_short(self) -> dict[int, ProcessFailure]:
        """Return the failures of workers that a stop ended, or that were not seen to end, by local rank."""
        return _failure.cut_short(self.exits, self.pids, self.count)

    def original_exception(self, rank: int) -> BaseException | None:
        """Return the exception that ended worker *rank*, if it can be rebuilt; else None."""
        store = self._missed_store()
        if store is not None and rank == _failure.blamed(self.ends(), self.count):
            return StartError(store.why)
        end = self.ends().get(rank)
        if end is not None:
            return _failure.original_exception(end)
        return None if self.lost is None else self.lost.cause

    def return_values(self, rank_base: int = 0) -> dict[int, Any]:
        """Return the workers' return values, by local rank plus *rank_base*; None from programs."""
        return _failure.return_values(self.exits, self.count, rank_base)


class TimeLimits:
    """The times by which the workers of a round must be gone: by a stop, and by a lease."""

    def __init__(self) -> None:
        self.signum = 0
        """The signal of the stop; 0 before one."""
        self.lease: Term | None = None
        """When it is over, the spawner kills the workers."""
        self._kill_at = 0.0
        """Time at which the workers that are being stopped get SIGKILL."""
        self._answer_by = math.inf
        """Time by which the spawner must have stopped all, those with an exit timeout too."""

    def begin_stop(self, signum: int, grace: float, exit_timeout: float) -> None:
        """Note a stop with *signum*; workers that failed keep their *exit_timeout* after *grace*."""
        self.signum = signum
        self._kill_at = monotonic() + grace
        self._answer_by = self._kill_at + exit_timeout + _ANSWER

    def shorten(self, grace: float) -> bool:
        """Leave the workers at most *grace* seconds; return False if they have no more than that."""
        deadline = monotonic() + grace
        # The latest deadline is that of spared workers, which have their exit timeout.
        if deadline >= self._answer_by - _ANSWER:
            return False
        self._kill_at, self._answer_by = min(self._kill_at, deadline), deadline + _ANSWER
        return True

    def grace_left(self) -> float:
        """Return the seconds until SIGKILL; 0 if that time is over, or none was set."""
        return max(0.0, self._kill_at - monotonic())

    def latest(self) -> float:
        """Return the time at which the workers must be gone; infinite without one."""
        return min(self._lease_end(), self._answer_by)

    def is_lease_over(self) -> bool:
        """Return True if the workers have no lease any more."""
        return monotonic() >= self._lease_end()

    def _lease_end(self) -> float:
        return math.inf if self.lease is None else self.lease.ends_at()


class WorkerStreams:
    """The streams of the workers: their log files, and the console on which some appear too."""

    def __init__(self, sink: records.Sink, duplicates: Duplicates, console: Console | None) -> None:
        self._sink = sink
        self._duplicates = duplicates
        self._console = console
        """None for this program's own streams."""
        self._tee: Tee | None = None

    def open(self, dest: LogsDest, prefixes: Mapping[int, bytes]) -> None:
        """Make the log files of *dest*, and show those of a round that are tee'd, with *prefixes*."""
        prepare_streams(dest)
        if self._tee is None:
            self._tee = self._make_tee()
        follow_streams(self._tee, dest, prefixes, self._duplicates, self._console)

    def _make_tee(self) -> Tee:
        """Return the tee of all rounds, to the console or to this program's own streams."""
        console = self._console
        if console is None:
            return Tee(console_sink(sys.stdout), console_sink(sys.stderr))
        return Tee(console, console, gather=console.gather, look=console.look)

    def drain(self, dest: LogsDest) -> None:
        """Copy the last lines of a round's workers, which must be gone, to the console."""
        for folder in full_folders(dest):
            self._sink(records.LogsCutOff(folder))
        if self._tee is not None:
            self._tee.drain_and_forget([*dest.tee_stdouts.values(), *dest.tee_stderrs.values()])

    def finish(self, timeout: float | None, impatient: Callable[[], object]) -> None:
        """Wait for the console to take all lines; every *timeout* seconds *impatient* may end the wait."""
        tee, self._tee = self._tee, None
        while tee is not None and not tee.finish(timeout):
            if impatient():
                break


class StartAttempts:
    """The attempts to start a round: nothing has run yet, so another one may follow a failure."""

    def __init__(self, sink: records.Sink) -> None:
        self._sink = sink
        self._lost = 0
        """Number of helpers that were lost."""

    def next_job(
        self, job: _plan.LaunchPlan, error: PreloadError | StartError, *, was_started: bool
    ) -> _plan.LaunchPlan | None:
        """
        Return the job for another attempt after *error*; None if none would help.

        *was_started*: the spawner is one of an earlier round.
        """
        if isinstance(error, PreloadError):
            if job.fork_server is None or not job.fork_server.is_automatic:
                return None
            # A job without torch, or one whose torch cannot be imported ahead, runs all the same.
            self._sink(records.PreloadSkipped(str(error)))
            return _plan.without_preload(job)

        self._lost += 1

        # A spawner of an earlier round may have died since, which this start has not caused.
        is_helper_lost = was_started or isinstance(error, HelperLostError)
        if not is_helper_lost or self._lost > _MOST_LOST:
            return None

        self._sink(records.HelperLost(str(error)))
        return job


class SpawnerSupervisor:
    """
    The spawner of a launch, which starts the workers of all its rounds, and the spawner's helpers.

    A round that needs a spawner gets it: the one of the round before, or a new one. Helpers that stand
    still are woken or replaced.
    """

    def __init__(self, job: _plan.LaunchPlan, count: int, sink: records.Sink) -> None:
        self.job = job
        self._count = count
        self._sink = sink
        self.client: SpawnerClient | None = None
        self._helpers = HelperWatch(sink)

        # Only imports of restarts are watched.
        self.imports = ImportWatch()

    def is_started(self) -> bool:
        """Return True if there is a spawner that can be asked."""
        return self.client is not None and self.client.started

    def fileno(self) -> int:
        """Return a descriptor that is readable when the spawner has sent events; -1 without a spawner."""
        return -1 if self.client is None else self.client.fileno()

    def start(
        self, number: int, specs: list[StartSpec], listener: int | None, interrupt: int | None,
        guard: Callable[[int], Term | None] | None, present: LocalRound, limits: TimeLimits,
    ) -> dict[int, int]:  # fmt: skip
        """
        Start the workers of the round *present*, and return {local rank: pid}; see `Processes.start`.

        It begins again if a helper was lost, or an automatic preload failed: nothing has run yet.
        """
        # New workers must get the present files.
        if self.client is not None and self.client.is_outdated():
            self.dismiss()

        attempts = StartAttempts(self._sink)
        while True:
            was_started = self.is_started()
            try:
                pids = self._begin(number, specs, listener, interrupt, guard, present, limits)
            except (PreloadError, StartError) as error:
                job = attempts.next_job(self.job, error, was_started=was_started)
                if job is None:
                    raise
                self.job = job
            else:
                fork_server = self.job.fork_server
                self.imports.begin(fork_server.preload if fork_server else (), monotonic())
                return pids

    def _begin(
        self, number: int, specs: list[StartSpec], listener: int | None, interrupt: int | None,
        guard: Callable[[int], Term | None] | None, present: LocalRound, limits: TimeLimits,
    ) -> dict[int, int]:  # fmt: skip
        if self.client is None:
            self.client = self._start_client(present)
        try:
            spawner = self.client.spawner(interrupt)
            if spawner is None:
                return {}
            limits.lease = None if guard is None else guard(spawner.fileno())
            return self.client.start(number, specs, listener, interrupt, limits.lease)
        except ElasticError:
            # Another attempt needs a spawner of its own: this one is lost, or has half begun.
            self.dismiss()
            raise

    def _start_client(self, present: LocalRound) -> SpawnerClient:
        client = SpawnerClient(self.job.common, self.job.memories, self._count, self.job.descriptors)
        client.wait_with(lambda: soonest(self._look_at_helpers(client, present), client.look_at_imports(self._sink)))
        if self.job.fork_server is None:
            assert self.job.call is not None
            client.fork_caller(self.job.call)
        else:
            fork_server = fork_servers.take(self.job.fork_server, self.job.common.env, self.job.search_path)
            client.employ(fork_server)
        return client

    def look(self, present: LocalRound) -> None:
        """Look at the helpers that the round *present* needs, and at imports that take long."""
        if self.client is None:
            return
        if not present.gone():
            self._look_at_helpers(self.client, present)
            self.imports.tend(self.client.ask_for_place, monotonic())
        elif present.hosts_for_others():
            # No worker of this node is left; the store's helpers serve those of other nodes.
            self._helpers.tend(self.client.helpers_of_others, (), self.client.replace)

    def _look_at_helpers(self, client: SpawnerClient, present: LocalRound) -> float:
        """Wake or replace helpers that stand still, if it is time; return the seconds until the next look."""
        return self._helpers.tend(client.helpers, present.running().values(), client.replace)

    def due_in(self, present: LocalRound) -> float | None:
        """Return the seconds until `look` must be called; None if the round *present* needs no helper."""
        if self.client is None or not (present.hosts_for_others() or not present.gone()):
            return None
        return soonest(self._helpers.due_in(), None if present.gone() else self.imports.due_in(monotonic()))

    def end_deaf(self, present: LocalRound, *, is_lease_over: bool) -> None:
        """Kill a spawner that does not answer, or not in time, and the workers of *present* with it."""
        self._sink(records.WorkersCutOff() if is_lease_over else records.SpawnerKilled(_ANSWER))
        # Killed first: a dismissal waits for an answer, and this spawner gives none.
        if self.client is not None:
            self.client.kill()
        self.dismiss()
        wait_until_gone(present.pids.values(), KILL_SECONDS)
        present.is_stopped = True

    def dismiss(self) -> None:
        """Kill the running workers and close the spawner; may be called in any state."""
        if self.client is not None:
            self.client.close()
            self.client = None


# The workers themselves.


class Processes:
    """The *count* workers of *job*; `start` begins a round, and one round ends before the next begins."""

    def __init__(
        self,
        job: _plan.LaunchPlan,
        count: int,
        sink: records.Sink = records.log,
        duplicates: Duplicates | None = None,
        console: Console | None = None,
    ) -> None:
        self._count = count
        self._sink = sink
        self._streams = WorkerStreams(sink, duplicates or Duplicates(), console)
        self._supervisor = SpawnerSupervisor(job, count, sink)
        self.round = LocalRound(count)
        """The workers of the present round, or of the last one."""
        self._board: Board | None = None
        self._limits = TimeLimits()
        self.imports = self._supervisor.imports
        self.awaits_stacks = False
        """True while a request for stacks has no answer."""

    # A round begins.

    def start(
        self,
        number: int,
        specs: Sequence[StartSpec],
        dest: LogsDest,
        prefixes: Mapping[int, bytes],
        *,
        listener: int | None = None,
        interrupt: int | None = None,
        guard: Callable[[int], Term | None] | None = None,
        rank_base: int = 0,
        world_size: int = 0,
    ) -> dict[int, int]:
        """
        Start round *number* and return {local rank: pid}.

        The result is {} if *interrupt* becomes readable and the workers are not started at once.
        It is {} too if the round failed at its start, which `poll` reports.

        * Each worker is started with one of *specs*; its streams come from *dest*.
        * *prefixes* stand before the console lines of tee'd streams.
        * *listener* is the bound socket of the round's store.
        * *guard* gets a handle of the process with which all workers will die, before they start.
          It may return a lease: all workers are killed when it is over.
        * The workers have the ranks from *rank_base* on, of *world_size*.

        Raises `StartError` or `PreloadError`; no process is left then.
        """
        with room_for_descriptors(_DESCRIPTORS[0] + _DESCRIPTORS[1] * self._count):
            # A stop, or a request for stacks, of the round before has no meaning for this one.
            self._limits, self.awaits_stacks = TimeLimits(), False
            dest = destinations_of(dest)
            self.round = LocalRound(
                self._count, dest, rank_base, world_size, listener is not None, _machine.memory_kills()
            )
            self._streams.open(dest, prefixes)
            outs, errs = dest.stdouts, dest.stderrs
            whole = [
                replace(spec, stdout=outs.get(spec.local_rank), stderr=errs.get(spec.local_rank)) for spec in specs
            ]

            self.round.pids = self._supervisor.start(
                number, whole, listener, interrupt, guard, self.round, self._limits
            )
            client = self._supervisor.client
            self._board = None if client is None else client.board
            return self.round.pids

    # The course of a round.

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has work; -1 without a spawner."""
        return self._supervisor.fileno()

    def poll(self) -> None:
        """Handle all events since the last call; never wait."""
        client = self._supervisor.client
        if client is None:
            return

        for event in client.drain():
            self.round.note(event)
            match event:
                case events.StacksRead():
                    self.awaits_stacks = False
                case events.CurrentLine(stacks):
                    self.imports.note_answer(stacks)

            are_all = self.round.world_size == self._count
            record = _failure.record_of(event, self.round.rank_base, are_all, self._limits.signum)
            if record is not None:
                self._sink(record)

        if monotonic() >= self._latest():
            self._supervisor.end_deaf(self.round, is_lease_over=self._limits.is_lease_over())
        else:
            self._supervisor.look(self.round)

    def poll_timeout(self) -> float | None:
        """Return the seconds until `poll` must be called even if nothing is readable; None for no limit."""
        latest = self._latest()
        until_latest = None if latest == math.inf else max(0.0, latest - monotonic())
        return soonest(until_latest, self._supervisor.due_in(self.round))

    def _latest(self) -> float:
        """Return the time at which the workers must be gone, by a lease or a stop."""
        return math.inf if self.round.gone() else self._limits.latest()

    # A round ends.

    def stop(
        self,
        signum: int,
        grace: float,
        meanwhile: Callable[[float | None], object] | None = None,
        *,
        somebody_waits: bool = False,
        spare_failed: bool = False,
    ) -> None:
        """
        Stop the workers with *signum*, and after *grace* seconds with SIGKILL; return when they
        are gone.

        With *spare_failed* workers whose programs failed keep their exit timeout, and detached
        processes end.

        Until then *meanwhile* is called repeatedly, with the longest time that it may take
        (seconds); it replaces the wait for this object alone. It may wait for others too, and
        call `hasten`. *somebody_waits*: a record says which workers are awaited.
        """
        self.poll()
        if self._supervisor.is_started() and self.round.may_leave_processes(spare_failed=spare_failed):
            self.ask_to_stop(signum, grace, spare_failed)
            self._await_end(meanwhile or (lambda limit: wait_readable([self], limit)), somebody_waits)
        # All may be gone at once, or an interrupt may have ended the wait for the fork server.
        if self.round.lost is not None or not self._supervisor.is_started():
            self.dismiss()
        self.drain()

    def _await_end(self, wait: Callable[[float | None], object], somebody_waits: bool) -> None:
        """Call *wait*, with the seconds that it may take, until the workers are gone."""
        report_at = monotonic() + _AT_ONCE if somebody_waits else math.inf
        while not self.round.gone():
            until_report = None if report_at == math.inf else max(0.0, report_at - monotonic())
            wait(soonest(until_report, self.poll_timeout()))
            self.poll()
            if monotonic() >= report_at and not self.round.gone():
                report_at = math.inf
                self._report_awaited()

    def _report_awaited(self) -> None:
        """Record which workers have not ended yet, and the time until they are killed."""
        left = {self.round.rank_base + rank: pid for rank, pid in self.round.running().items()}
        seconds = self._limits.grace_left()
        if left and seconds > 0:
            self._sink(records.StopAwaited(left, self._limits.signum, seconds))

    def ask_to_stop(self, signum: int, grace: float, spare_failed: bool = False) -> None:
        """Begin to stop the workers, as `stop` does, and return at once."""
        self.imports.rest()
        if self.stop_board is not None:
            self.stop_board.let_signals_act()
        # After a success a stop ends detached processes: the spawner reports once more that all are gone.
        self.round.is_stopped = False
        self._limits.begin_stop(signum, grace, self._supervisor.job.common.exit_timeout[0] if spare_failed else 0.0)
        client = self._supervisor.client
        if client is None:
            return
        client.stop(signum, grace, spare_failed)
        if signum == SIGTERM and self.stop_board is not None:
            # In native code they cannot handle it, and its default action would have ended them at once.
            for rank in self.stop_board.ignoring():
                client.signal(rank, SIGKILL)

    def hasten(self, signum: int, grace: float) -> None:
        """Send *signum* to workers that are being stopped, and leave them at most *grace* seconds."""
        if self._supervisor.client is not None and self._limits.shorten(grace):
            self._supervisor.client.stop(signum, grace)

    def ask_for_stacks(self) -> None:
        """
        Request a record of the stacks of all running workers (`records.StacksReported`).

        It is recorded at once if none runs.
        """
        client = self._supervisor.client
        if client is None or not client.started or self.round.gone():
            self._sink(records.StacksReported({}))
        else:
            self.awaits_stacks = True
            client.ask_for_stacks()

    def now(self, local_rank: int) -> events.WorkerNow:
        """Return the state of the worker *local_rank*; any thread may call it."""
        return self.round.now(local_rank, self._board)

    def signal(self, local_rank: int, signum: int) -> None:
        """Signal one worker and all processes that it started; do nothing once it has ended."""
        if self._supervisor.client is not None:
            self._supervisor.client.signal(local_rank, signum)

    def pass_on(self, signum: int, spared: Sequence[int] = ()) -> bool:
        """
        Send *signum* to each worker that handles it, but for the local ranks *spared*; it would kill the others.

        Return True if a worker handles it.
        """
        client = self._supervisor.client
        if client is None or not client.started:
            return False
        ranks = [rank for rank in range(self._count) if rank not in spared]
        running = self.round.running()
        # Before the signal: a worker may handle it and end before this process goes on.
        is_handled = any(catches(running[rank], signum) for rank in ranks if rank in running)
        client.pass_on(signum, ranks)
        return is_handled

    @property
    def stop_board(self) -> StopBoard | None:
        """The workers' side of `should_stop` in this round; None without memory for it."""
        return None if self._board is None else self._board.stop

    def grace_left(self) -> float:
        """Return the seconds that workers which are being stopped have until SIGKILL."""
        return self._limits.grace_left()

    def drain(self) -> None:
        """Copy the last lines of this round's workers, which must be gone, to the console."""
        self._streams.drain(self.round.dest)

    def dismiss(self) -> None:
        """Kill the running workers and close the spawner; may be called in any state."""
        self._supervisor.dismiss()

    def finish(self, timeout: float | None = None, impatient: Callable[[], object] = bool) -> None:
        """Wait for the console to take all lines; every *timeout* seconds *impatient* may end the wait."""
        self._streams.finish(timeout, impatient)
