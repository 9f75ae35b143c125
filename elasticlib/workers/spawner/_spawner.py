"""
The spawner: one process per launch that forks the workers, sees their ends and stops them.

It is forked from the fork server (or, with start method ``fork``, from the caller) and gets
orders over a channel from the launcher. It is the workers' parent and adopts their orphans. So it
alone signals and reaps, and cannot mistake one pid for another. It kills every descendant and
ends when the launcher is gone, or when no process above it would end it with the launcher.

Rules of this file: it never waits for one thing only. Every stop has the same steps: the signal
to the workers, then to their groups, one deadline, SIGKILL. Then it reports the survivors
(uninterruptible sleep) and continues.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib._clock import monotonic
from elasticlib.processes import (
    CUT_OFF,
    FEW_PROCESSES,
    Channel,
    Handle,
    Lease,
    Message,
    close_each,
    kill_descendants,
    living_parent,
    new_parent,
)
from elasticlib.workers.child import _announcing, _exiting, _report, _showing, _threads
from elasticlib.workers.child._start_spec import Handed, StartSpec
from elasticlib.workers.spawner import _kernel_facts, _stuck
from elasticlib.workers.spawner._detached import Detached
from elasticlib.workers.spawner._fork_worker import fork_worker
from elasticlib.workers.spawner._stack_dump import StackDump, shared_text
from elasticlib.workers.spawner._store_host import StoreHost
from elasticlib.workers.spawner._worker_process import Left, WorkerProcess

_FIXES = {
    errno.EMFILE: "; each worker needs three descriptors: raise the hard limit of open files (ulimit -Hn)",
    errno.EAGAIN: FEW_PROCESSES,
    errno.ENOMEM: "; start fewer workers",
}
_LONGEST_WAIT = 86400.0
_SHORTEST_WAIT = 0.01
_MOST_NOTICES = 65536
"""Bytes that a pipe holds."""


class RoundRelease:
    """
    The pipe at which functions that have returned wait, until those of all local ranks have.

    It is written to once a round. A byte releases them, not a closed end, because other processes
    may hold copies of the end.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = ()

    def begin_round(self) -> None:
        """Hold returned functions from now on. Raises OSError if no descriptor is free."""
        self.close()
        self._ends = os.pipe2(os.O_CLOEXEC)

    def for_workers(self) -> tuple[int, tuple[int, int]]:
        """Return the end that workers wait at, and its identity."""
        reading, _ = self._ends
        return reading, _report.identity(reading)

    def give(self) -> None:
        """Release all functions that wait now, or later."""
        for writing in self._ends[1:]:
            os.write(writing, b".")

    def own(self) -> tuple[int, ...]:
        """Return the descriptors that workers need not hold."""
        return self._ends[1:]

    def close(self) -> None:
        """Close the descriptors."""
        close_each(self._ends)
        self._ends = ()


@dataclass(eq=False)
class Spawner:
    """The workers of one launch, round after round."""

    _launcher: Channel
    _parent: int
    _keep: frozenset[int]
    """Descriptors that modules of the fork server opened at import: workers keep them."""
    _detached: Detached
    _changed: dict[str, str | None] = field(default_factory=dict)
    """
    Variables that the fork server's interpreter or imports set or (None) removed, as in a plain
    program.
    """
    _call: Callable[[], Any] | None = None
    """The entry point itself if the caller was forked; otherwise None, and it is sent pickled."""
    _guardian: int = 0
    """
    The process that becomes the parent when the present one ends, and guards this launch too; 0
    for none.
    """
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _live: dict[int, WorkerProcess] = field(default_factory=dict)
    _common: StartSpec = field(default_factory=StartSpec)
    """The part of the `StartSpec` that all workers of the launch share."""
    _memories: dict[str, int] = field(default_factory=dict)
    """Pickled function and ``__main__`` definitions, as descriptors."""
    _round: int = -1
    _survivors: list[int] = field(default_factory=list)
    _notices: tuple[int, int] = (-1, -1)
    """The pipe through which workers announce the outcomes of their programs."""
    _heard: _announcing.Notices = field(default_factory=_announcing.Notices)
    _release: RoundRelease = field(default_factory=RoundRelease)
    """The release of functions that have returned."""
    _stopping: _stuck.RoundStop | None = None
    """Record of workers that are slow to end."""
    _lease: Lease | None = None
    """The lease of the workers, in a job of many nodes."""
    _stacks: StackDump = field(default_factory=StackDump)
    _store: StoreHost = field(init=False)

    def __post_init__(self) -> None:
        self._store = StoreHost(self._selector, self._keep, self._store_began, self._store_ended)

    def serve(self) -> NoReturn:
        """Follow orders until the launcher or the parent is gone."""
        self._selector.register(self._launcher, selectors.EVENT_READ, self._obey)
        parent = living_parent(self._parent)
        self._selector.register(parent, selectors.EVENT_READ, lambda: self._lose_parent(parent))
        self.listen()
        while True:
            for key, _ in self._selector.select(self._left()):
                key.data()
            for worker in list(self._live.values()):
                self._look_at(worker)
            if self._stopping is not None and monotonic() >= self._stopping.next_look:
                self._look_for_stuck(self._stopping)
            if self._stacks.next_look is not None and monotonic() >= self._stacks.next_look:
                self._answer_with_stacks(self._stacks.look(monotonic()))
            if monotonic() >= self._lease_end():
                # Other nodes may have the ranks of these workers from now on, and no other
                # process here has ended them.
                kill_descendants()
                self._launcher.send({"op": "broken", "why": CUT_OFF})
                self._leave()

    def listen(self) -> None:
        """Open the pipe through which workers announce the outcomes of their programs."""
        self._notices = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._notices[0], selectors.EVENT_READ, self._hear)

    def _left(self) -> float | None:
        """Return the seconds until something is due; None for no limit."""
        now = monotonic()
        due = [each.course.deadline for each in self._live.values() if each.course.deadline is not None]
        if self._stopping is not None:
            due.append(self._stopping.next_look)
        if self._stacks.next_look is not None:
            due.append(self._stacks.next_look)
        end = self._lease_end()
        if end < math.inf:
            # It may be renewed before, or shortened: it is checked again after half of the time.
            due.append(min(end, now + max(_SHORTEST_WAIT, (end - now) / 2)))

        if not due:
            return None

        # The kernel limits the length of a wait.
        return min(max(0.0, min(due) - now), _LONGEST_WAIT)

    def _lose_parent(self, parent: Handle) -> None:
        """
        Continue under the guardian, if that replaces *parent*, a fork server that has ended;
        otherwise end.

        A launch that has begun does not need a fork server.
        """
        self._selector.unregister(parent)
        parent.close()
        guardian = new_parent(self._guardian)
        if guardian is None:
            self._leave()
        self._selector.register(guardian, selectors.EVENT_READ, self._leave)

    def _leave(self) -> NoReturn:
        kill_descendants()
        os._exit(0)

    def _lease_end(self) -> float:
        return self._lease.ends_at() if self._lease is not None and self._live else math.inf

    def _obey(self) -> None:
        received = self._launcher.receive()
        if received is None:
            self._leave()
        message, descriptors = received
        match message["op"]:
            case "job":
                self._take_job(message, descriptors)
            case "start":
                self._start(message, descriptors)
            case "signal":
                self._signal_worker(message)
            case "pass on":
                self._pass_on(message["signal"])
            case "stacks":
                self._look_at_stacks("stacks", list(self._live.values()))
            case "place":
                self._look_at_stacks("place", self._workers_to_sample())
            case "stop":
                self._stop(message["signal"], message["grace"], message["spare"])
            case "ping":
                self._launcher.send({**message, "op": "pong"})
            case "signal store":
                self._store.signal(message["signal"])
            case "quit":
                self._quit()

    def _take_job(self, message: Message, descriptors: list[int]) -> None:
        self._common = StartSpec.of(message["common"])
        self._memories = dict(zip(message["memories"], descriptors, strict=True))
        with processes.own_descriptors() as itself:
            self._launcher.send({"op": "spawning", "spawner": os.getpid()}, itself)

    def _signal_worker(self, message: Message) -> None:
        worker = self._live.get(message["local_rank"])
        # The order may have been sent before the launcher knew the round's end.
        if worker is not None and message["round"] == self._round:
            worker.send_group(message["signal"])

    def _pass_on(self, signum: int) -> None:
        for each in self._live.values():
            each.pass_on(signum)

    def _workers_to_sample(self) -> list[WorkerProcess]:
        return [each for each in self._live.values() if each.may_be_sampled()]

    def _look_at_stacks(self, asker: str, workers: Sequence[WorkerProcess]) -> None:
        seen = [each.seen() for each in workers]
        self._stacks.begin(seen, monotonic(), asker)

    def _quit(self) -> NoReturn:
        self._store.end()
        # Processes that were kept may have detached others.
        self._detached.sweep((), keeps=self._keeps_detached())
        os._exit(0)

    def _start(self, message: Message, descriptors: list[int]) -> None:
        self._round = message["round"]
        self._survivors = []
        self._detached.begin_round()
        self._store.end()
        streams, given = descriptors[:3], dict(zip(message["more"], descriptors[3:], strict=True))
        if "store" in given:
            self._store.await_knock(given["store"])
        if self._lease is not None:
            self._lease.close()
        self._lease = Lease(given["lease"]) if "lease" in given else None

        # Before any program runs: the launcher must not think that the round has not begun.
        self._launcher.send({"op": "starting", "round": self._round})
        _threads.set_torch_threads(self._common.threads)
        try:
            self._release.begin_round()
            for differences in message["workers"]:
                self._start_worker(self._common.with_differences(differences), streams)
        except OSError as error:
            # No process, memory or descriptor left: the launcher drops this spawner, which ends
            # the running workers.
            fix = _FIXES.get(error.errno or 0, "")
            self._launcher.send({"op": "broken", "why": f"a worker could not be started: {error}{fix}"})
            return
        finally:
            close_each(streams)

        self._launcher.send({"op": "started", "round": self._round, "pids": {n: w.pid for n, w in self._live.items()}})

    def _start_worker(self, spec: StartSpec, streams: list[int]) -> None:
        left = Left()
        release, release_identity = self._release.for_workers()
        opened = {
            name: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            for name, path in (("stdout", spec.stdout), ("stderr", spec.stderr))
            if path is not None
        }
        handed = Handed(
            environment=spec.environment(self._changed),
            streams=[streams[0], opened.get("stdout", streams[1]), opened.get("stderr", streams[2])],
            report=left.report,
            identity=_report.identity(left.report),
            faults=left.faults,
            tail=left.tail,
            notices=self._notices[1],
            notices_identity=_report.identity(self._notices[1]),
            release=release,
            release_identity=release_identity,
            spawner=os.getpid(),
            memories=self._memories,
        )
        try:
            pid = self._fork(spec, handed)
        finally:
            close_each(opened.values())

        course = _exiting.ExitCourse(*spec.exit_timeout, for_group=spec.signals_group)
        live = WorkerProcess(self._round, spec.local_rank, pid, processes.handle_of(pid), left, course)
        self._live[live.local_rank] = live
        self._detached.add_worker(pid)
        self._selector.register(live.handle, selectors.EVENT_READ, lambda: self._ended(live))

    def _fork(self, spec: StartSpec, handed: Handed) -> int:
        drop = None if self._call is None else self._own_descriptors()
        return fork_worker(spec, handed, self._keep, drop, self._call)

    def _own_descriptors(self) -> list[int]:
        """Return the descriptors that a worker, forked with all of the caller's, must not hold."""
        own = [key.fd for key in self._selector.get_map().values()]
        own += [self._detached.fileno(), *self._release.own()]
        if self._lease is not None:
            own.append(self._lease.fileno())
        for worker in self._live.values():
            own += worker.left.all()
        return [*own, self._selector.fileno()]  # type: ignore[attr-defined]

    def _ended(self, worker: WorkerProcess) -> None:
        # Its announcements before its end count, and are in the pipe by now.
        self._hear()
        # It stays a zombie until its group is killed: so no other process has its number.
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        self._selector.unregister(worker.handle)
        if worker.others_in_group() and worker.course.leaves_time_to_group(monotonic()):
            if not worker.course.for_group:
                worker.ask_group()
        else:
            self._reap(worker)

    def _look_at_group(self, worker: WorkerProcess) -> None:
        """
        Reap the worker, which has ended, if no process of its group is left that could handle the
        signal.
        """
        left = worker.others_in_group()
        if not left:
            self._reap(worker)
            return
        # Processes that ignore the signal may end for other reasons: they get some time, too.
        had_its_time = worker.course.patience_is_over(monotonic())
        if had_its_time and all(_kernel_facts.ignores(pid, worker.signum) for pid in left):
            self._reap(worker)

    def _reap(self, worker: WorkerProcess) -> None:
        # Kill the group while the leader is a zombie: its pid, hence the group's, is not free yet.
        worker.send_group(signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        facts = worker.course.facts_of_end(os.waitstatus_to_exitcode(status))
        self._detached.succeeded = self._detached.succeeded and facts["exitcode"] == 0
        self._tell("exited", worker, worker.left.all(), told=worker.was_signalled, **facts)
        self._forget(worker)

    def _tell(self, what: str, worker: WorkerProcess, descriptors: tuple[int, ...] = (), **facts: object) -> None:
        message = {"op": what, "round": worker.round, "local_rank": worker.local_rank, "pid": worker.pid}
        self._launcher.send(message | facts, descriptors)

    def _forget(self, worker: WorkerProcess) -> None:
        self._stacks.end(worker.local_rank)
        worker.close()
        # A worker may be killed in the middle of its report.
        self._heard.report_of(worker.pid)
        del self._live[worker.local_rank]
        if self._live:
            self._look_who_runs()
        else:
            self._all_ended()

    def _look_who_runs(self) -> None:
        """Release functions that have returned when all have; note the last running worker."""
        now = monotonic()
        running = [each.course for each in self._live.values() if not each.course.waits()]
        if not running:
            self._release.give()
            for each in self._live.values():
                each.course.release(now)
        elif len(running) == 1 and self._detached.succeeded:
            running[0].note_others_finished(now, is_function=self._common.kind == "function")

    def _all_ended(self) -> None:
        self._stopping = None
        if not self._detached.succeeded:
            self._store.end()
        # Otherwise it stays as long as this process: workers of other nodes may still use it.
        stays = [*self._survivors, *self._store.pids()]
        left, ended = self._detached.sweep(stays, keeps=self._keeps_detached())
        survivors = [*self._survivors, *left]
        self._launcher.send({"op": "stopped", "round": self._round, "survivors": survivors, "ended": ended})

    def _keeps_detached(self) -> bool:
        return not self._common.serves_caller

    def _stop(self, signum: int, grace: float, spare: bool) -> None:
        # A program that saves at a signal and exits with 0 has succeeded, and may leave its
        # upload behind. That does not apply if the stop follows a failure, or others wait for a
        # restart. The restart may be another node's, after all workers here ended.
        self._detached.succeeded = self._detached.succeeded and not spare
        if not self._live:
            self._all_ended()
            return

        # A worker that failed, or waits for others, may just have announced it.
        self._hear()
        self._release.give()
        now = monotonic()
        is_another = self._stopping is None or self._stopping.signum != signum
        if is_another:
            self._stopping = _stuck.RoundStop(signum, now, restart_waits=spare)
        for worker in self._live.values():
            must_be_signalled = worker.course.stop(grace, now, spare)
            # Not a second time: a program may take a second signal for an order to end at once.
            if must_be_signalled and worker.signum != signum:
                worker.ask(signum)

    def _look_for_stuck(self, stop: _stuck.RoundStop) -> None:
        """End a worker in native code, if that may free the others for their own ends."""
        signalled = {rank: each for rank, each in self._live.items() if each.course.stage is _exiting.Stage.SIGNALLED}
        if not signalled:
            self._stopping = None
            return

        looks = {rank: _stuck.look(worker.pid, stop.signum) for rank, worker in signalled.items()}
        rank = stop.stuck(looks, monotonic())
        if rank is None:
            return

        worker = signalled[rank]
        self._tell("stuck", worker, waited=monotonic() - stop.began)
        worker.send_group(signal.SIGKILL)

    def _hear(self) -> None:
        """Read the workers' announcements on the outcomes of their programs."""
        try:
            data = os.read(self._notices[0], _MOST_NOTICES)
        except BlockingIOError:
            return
        self._take_notices(data)
        if any(each.course.waits() for each in self._live.values()):
            self._look_who_runs()

    def _take_notices(self, data: bytes) -> None:
        workers = {each.pid: each for each in self._live.values()}
        for pid, outcome, status in self._heard.take(data):
            if pid in workers:
                # A worker that has ended is left out.
                self._note_outcome(workers[pid], outcome, status)

    def _note_outcome(self, worker: WorkerProcess, outcome: _announcing.ProgramOutcome, status: int) -> None:
        report = self._heard.report_of(worker.pid)
        if report:
            # No file could hold the report: it came through the pipe.
            worker.left.put_report(report)
        if worker.course.heard(outcome, status, monotonic()):
            self._tell("failed", worker, worker.left.reports(), exitcode=status)

    def _look_at(self, worker: WorkerProcess) -> None:
        """Take the actions that are due for a worker which is slow to end."""
        course = worker.course
        if course.deadline is None or monotonic() < course.deadline:
            return
        stacks = worker.stacks()
        has_returned = _showing.has_returned(stacks or "")
        for act in course.due(monotonic(), stacks is not None, has_returned):
            self._do(act, worker, stacks or "")

    def _do(self, act: _exiting.ExitAction, worker: WorkerProcess, stacks: str) -> None:
        course = worker.course
        match act:
            case _exiting.ExitAction.DUMP:
                worker.dump()
            case _exiting.ExitAction.TELL:
                self._tell_with_stacks("lingers", worker, stacks, seconds=course.exit_timeout, ends=course.overdue)
            case _exiting.ExitAction.TELL_LAST_RUNS:
                seconds, left = course.time_of_last_runs(monotonic())
                self._tell_with_stacks("last_runs", worker, stacks, seconds=seconds, left=left)
            case _exiting.ExitAction.TERM:
                worker.ask(signal.SIGTERM)
            case _exiting.ExitAction.ASK_GROUP:
                self._ask_group(worker)
            case _exiting.ExitAction.LOOK_AT_GROUP:
                self._look_at_group(worker)
            case _exiting.ExitAction.END_GROUP:
                self._reap(worker)
            case _exiting.ExitAction.KILL:
                worker.kill()
            case _exiting.ExitAction.GIVE_UP:
                self._give_up(worker)

    def _tell_with_stacks(self, what: str, worker: WorkerProcess, stacks: str, **facts: object) -> None:
        with shared_text(stacks) as memories:
            self._tell(what, worker, memories, **facts)

    def _ask_group(self, worker: WorkerProcess) -> None:
        if worker.is_writing():
            # The worker could not save without its children.
            worker.course.postpone_group(monotonic())
        else:
            worker.ask_group()

    def _give_up(self, worker: WorkerProcess) -> None:
        # It is in uninterruptible sleep: a later sweep reaps it, if it ever ends.
        self._survivors.append(worker.pid)
        self._selector.unregister(worker.handle)
        self._forget(worker)

    def _answer_with_stacks(self, found: dict[int, str] | None) -> None:
        if found is None:
            return
        with shared_text(dumps(found)) as memories:
            for asker in self._stacks.askers:
                self._launcher.send({"op": asker, "round": self._round}, memories)

    def _store_began(self, pid: int) -> None:
        self._launcher.send({"op": "hosting", "round": self._round, "pid": pid})

    def _store_ended(self, why: str, pid: int, exitcode: int) -> None:
        # A program that has just announced its success needs no store.
        self._hear()
        needed = not all(each.course.program.ended_well() for each in self._live.values())
        facts = {"round": self._round, "why": why, "pid": pid, "exitcode": exitcode, "needed": needed}
        self._launcher.send({"op": "store", **facts})
