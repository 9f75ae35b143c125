"""
The worker processes of one launch on this machine, round after round, with their logs.

Rules of this file: ranks are local ones. It decides nothing, and waits for the workers only. A
caller that must be interrupted passes a descriptor, or waits without this class. At the end of a
round, the log files are read to their last byte before anything is reported.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elasticlib import records
from elasticlib._clock import monotonic
from elasticlib._times import Term, soonest
from elasticlib.errors import ElasticError, PreloadError, StartError
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
from elasticlib.processes import KILL_SECONDS, HelperLostError, room_for_descriptors, wait_readable, wait_until_gone
from elasticlib.spec import LogsDest
from elasticlib.workers import _failure, _launch_events as heard, _machine, _plan
from elasticlib.workers._fork_servers import fork_servers
from elasticlib.workers._launch import SpawnerClient
from elasticlib.workers._local_round import LocalRound
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


class Processes:
    """
    The *count* workers of *job*; `start` begins a round, and one round ends before the next
    begins.
    """

    def __init__(
        self,
        job: _plan.LaunchPlan,
        count: int,
        sink: records.Sink = records.log,
        duplicates: Duplicates | None = None,
        console: Console | None = None,
    ) -> None:
        self._job = job
        self._count = count
        self._sink = sink
        self._duplicates = duplicates or Duplicates()

        # None means this program's own streams.
        self._console = console
        self._spawner: SpawnerClient | None = None
        self._tee: Tee | None = None
        self.round = LocalRound(count)
        """The workers of the present round, or of the last one."""
        self._board: Board | None = None

        # The time when the workers will be killed, once they are being stopped.
        self._deadline = 0.0
        self._helpers = HelperWatch(sink)

        # Only imports of restarts are watched.
        self.imports = ImportWatch()
        self._forget_stop()

    def _forget_stop(self) -> None:
        """Forget the stop of the round before."""
        self.awaits_stacks = False
        """True while a request for stacks has no answer."""
        # The time when the spawner must have stopped the workers.
        self._limit = math.inf
        self._lease: Term | None = None
        self._signum = 0

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
            self._forget_stop()
            dest = destinations_of(dest)
            self.round = LocalRound(
                self._count, dest, rank_base, world_size, listener is not None, _machine.memory_kills()
            )
            prepare_streams(dest)
            if self._tee is None:
                self._tee = self._make_tee()
            follow_streams(self._tee, dest, prefixes, self._duplicates, self._console)
            outs, errs = dest.stdouts, dest.stderrs
            whole = [
                replace(spec, stdout=outs.get(spec.local_rank), stderr=errs.get(spec.local_rank)) for spec in specs
            ]

            # New workers must get the present files.
            if self._spawner is not None and self._spawner.is_outdated():
                self.dismiss()
            self.round.pids = self._insist(functools.partial(self._begin, number, whole, listener, interrupt, guard))
            fork_server = self._job.fork_server
            self.imports.begin(fork_server.preload if fork_server else (), monotonic())
            return self.round.pids

    def _make_tee(self) -> Tee:
        """Return the tee of all rounds, to the console or to this program's own streams."""
        console = self._console
        if console is None:
            return Tee(console_sink(sys.stdout), console_sink(sys.stderr))
        return Tee(console, console, gather=console.gather, look=console.look)

    def _insist(self, begin: Callable[[], dict[int, int]]) -> dict[int, int]:
        """Begin again if a helper was lost, or an automatic preload failed: nothing has run yet."""
        lost = 0
        while True:
            # A spawner of an earlier round may have died since, which this start has not caused.
            was_started = self._spawner is not None and self._spawner.started
            try:
                return begin()
            except PreloadError as error:
                fork_server = self._job.fork_server
                if fork_server is None or not fork_server.is_automatic:
                    raise
                # A job without torch, or one whose torch cannot be imported ahead, runs all the
                # same.
                self._sink(records.PreloadSkipped(str(error)))
                self._job = _plan.without_preload(self._job)
            except StartError as error:
                lost += 1
                is_helper_lost = was_started or isinstance(error, HelperLostError)
                if not is_helper_lost or lost > _MOST_LOST:
                    raise
                self._sink(records.HelperLost(str(error)))

    def _begin(
        self, number: int, specs: list[StartSpec], listener: int | None, interrupt: int | None,
        guard: Callable[[int], Term | None] | None,
    ) -> dict[int, int]:  # fmt: skip
        if self._spawner is None:
            self._spawner = self._start_spawner()
        try:
            spawner = self._spawner.spawner(interrupt)
            if spawner is None:
                return {}
            self._board = self._spawner.board
            self._lease = None if guard is None else guard(spawner.fileno())
            return self._spawner.start(number, specs, listener, interrupt, self._lease)
        except ElasticError:
            self.dismiss()
            raise

    def _start_spawner(self) -> SpawnerClient:
        spawner = SpawnerClient(self._job.common, self._job.memories, self._count, self._job.descriptors)
        spawner.wait_with(lambda: soonest(self._look_at_helpers(spawner), spawner.look_at_imports(self._sink)))
        if self._job.fork_server is None:
            assert self._job.call is not None
            spawner.fork_caller(self._job.call)
        else:
            fork_server = fork_servers.take(self._job.fork_server, self._job.common.env, self._job.search_path)
            spawner.employ(fork_server)
        return spawner

    # The course of a round.

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has work; -1 without a spawner."""
        return -1 if self._spawner is None else self._spawner.fileno()

    def poll(self) -> None:
        """Handle all events since the last call; never wait."""
        if self._spawner is None:
            return

        for event in self._spawner.drain():
            self.round.note(event)
            match event:
                case heard.StacksRead():
                    self.awaits_stacks = False
                case heard.CurrentLine(stacks):
                    self.imports.heard(stacks)

            are_all = self.round.world_size == self._count
            record = _failure.record_of(event, self.round.rank_base, are_all, self._signum)
            if record is not None:
                self._sink(record)

        self._tend(self._spawner)

    def _tend(self, spawner: SpawnerClient) -> None:
        """End a spawner that does not stop its workers in time; else look at the helpers."""
        if monotonic() >= self._latest():
            self._end_deaf(spawner)
        elif not self.round.gone():
            self._look_at_helpers(spawner)
            self.imports.tend(spawner.ask_for_place, monotonic())
        elif self.round.hosts_for_others():
            # No worker of this node is left; the store's helpers serve those of other nodes.
            self._helpers.tend(spawner.helpers_of_others, (), spawner.replace)

    def poll_timeout(self) -> float | None:
        """
        Return the seconds until `poll` must be called even if nothing is readable; None for no
        limit.
        """
        latest = self._latest()
        until_latest = None if latest == math.inf else max(0.0, latest - monotonic())
        has_helpers = not self.round.gone() or self.round.hosts_for_others()
        if self._spawner is None or not has_helpers:
            return until_latest
        until_question = None if self.round.gone() else self.imports.due_in(monotonic())
        return soonest(until_latest, self._helpers.due_in(), until_question)

    def _look_at_helpers(self, spawner: SpawnerClient) -> float:
        """
        Wake or replace helpers that stand still, if it is time; return the seconds until the next
        look.
        """
        return self._helpers.tend(spawner.helpers, self.round.running().values(), spawner.replace)

    def _latest(self) -> float:
        """Return the time at which the workers must be gone, by a lease or a stop."""
        return math.inf if self.round.gone() else min(self._lease_end(), self._limit)

    def _lease_end(self) -> float:
        return math.inf if self._lease is None else self._lease.ends_at()

    def _end_deaf(self, spawner: SpawnerClient) -> None:
        """Kill a spawner that does not answer, or not in time, and the workers with it."""
        is_over = monotonic() >= self._lease_end()
        self._sink(records.WorkersCutOff() if is_over else records.SpawnerKilled(_ANSWER))
        spawner.kill()
        self.dismiss()
        wait_until_gone(self.round.pids.values(), KILL_SECONDS)
        self.round.is_stopped = True

    # A round ends.

    def stop(
        self,
        signum: int,
        grace: float,
        meanwhile: Callable[[float | None], None] | None = None,
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
        if self._is_started() and self._may_have_processes(spare_failed):
            self.ask_to_stop(signum, grace, spare_failed)
            self._await_end(meanwhile or self._wait, somebody_waits)
        # All may be gone at once, or an interrupt may have ended the wait for the fork server.
        if self.round.lost is not None or not self._is_started():
            self.dismiss()
        self.drain()

    def _may_have_processes(self, spare_failed: bool) -> bool:
        if not self.round.gone():
            return True
        # After a success with *spare_failed* there may be detached processes, which end now.
        return spare_failed and self.round.all_succeeded()

    def _is_started(self) -> bool:
        return self._spawner is not None and self._spawner.started

    def _wait(self, timeout: float | None) -> None:
        wait_readable([self], timeout)

    def _await_end(self, wait: Callable[[float | None], None], somebody_waits: bool) -> None:
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
        seconds = self._deadline - monotonic()
        if left and seconds > 0:
            self._sink(records.StopAwaited(left, self._signum, seconds))

    def ask_to_stop(self, signum: int, grace: float, spare_failed: bool = False) -> None:
        """Begin to stop the workers, as `stop` does, and return at once."""
        self.imports.rest()
        self._deadline, self._signum, self.round.is_stopped = monotonic() + grace, signum, False
        exit_timeout = self._job.common.exit_timeout[0] if spare_failed else 0.0
        self._limit = self._deadline + exit_timeout + _ANSWER
        if self._spawner is not None:
            self._spawner.stop(signum, grace, spare_failed)

    def hasten(self, signum: int, grace: float) -> None:
        """
        Send *signum* to workers that are being stopped, and leave them at most *grace* seconds.
        """
        deadline = monotonic() + grace
        # The latest deadline is that of spared workers, which have their exit timeout.
        if self._spawner is not None and deadline < self._limit - _ANSWER:
            self._deadline, self._limit = min(self._deadline, deadline), deadline + _ANSWER
            self._spawner.stop(signum, grace)

    def ask_for_stacks(self) -> None:
        """
        Request a record of the stacks of all running workers (`records.StacksTold`).

        It is recorded at once if none runs.
        """
        if self._spawner is None or not self._spawner.started or self.round.gone():
            self._sink(records.StacksTold({}))
        else:
            self.awaits_stacks = True
            self._spawner.ask_for_stacks()

    def now(self, local_rank: int) -> heard.WorkerNow:
        """Return the state of the worker *local_rank*; any thread may call it."""
        progress = None if self._board is None else self._board.read(local_rank)
        stdout = self.round.dest.stdouts.get(local_rank, "")
        stderr = self.round.dest.stderrs.get(local_rank, "")
        pid, end = self.round.pids.get(local_rank, 0), self.round.ends().get(local_rank)
        return heard.WorkerNow.of(local_rank, pid, end, progress, stdout, stderr)

    def signal(self, local_rank: int, signum: int) -> None:
        """Signal one worker and all processes that it started; do nothing once it has ended."""
        if self._spawner is not None:
            self._spawner.signal(local_rank, signum)

    def pass_on(self, signum: int) -> None:
        """Send *signum* to each worker that handles it; it would kill the others."""
        if self._spawner is not None and self._spawner.started:
            self._spawner.pass_on(signum)

    def grace_left(self) -> float:
        """Return the seconds that workers which are being stopped have until SIGKILL."""
        return max(0.0, self._deadline - monotonic())

    def drain(self) -> None:
        """Copy the last lines of this round's workers, which must be gone, to the console."""
        for folder in full_folders(self.round.dest):
            self._sink(records.LogsCutOff(folder))
        if self._tee is not None:
            self._tee.drain_and_forget([*self.round.dest.tee_stdouts.values(), *self.round.dest.tee_stderrs.values()])

    def dismiss(self) -> None:
        """Kill the running workers and close the spawner; may be called in any state."""
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None

    def finish(self, timeout: float | None = None, impatient: Callable[[], object] = bool) -> None:
        """
        Wait for the console to take all lines; every *timeout* seconds *impatient* may end the
        wait.
        """
        tee, self._tee = self._tee, None
        while tee is not None and not tee.finish(timeout):
            if impatient():
                break
