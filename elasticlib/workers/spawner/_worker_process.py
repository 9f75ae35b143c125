"""
A worker's process and its group, as the spawner signals them, the files in which it leaves its
report, and the steps to the ends of all workers of a round.

A stop signal is sent to the worker alone while the worker can forward it. Its children, such as
those of a DataLoader, would die first, and the worker's handler could not save. They get it when
the worker has ended, or after half of the time.

Rules of this file: the group is signalled by its number only until the worker, its leader, is
reaped. Time comes from the clock here, and the decisions from `_exiting` and `_stuck`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elasticlib import processes
from elasticlib._clock import monotonic
from elasticlib.processes import (
    Channel,
    catches,
    close_each,
    files_with_content,
    ignores,
    is_ending,
    is_memory_cleaner,
    signal_descendant,
    signal_group,
    signal_process,
)
from elasticlib.workers.child import _child, _showing
from elasticlib.workers.child._announcing import Notices, ProgramOutcome, RoundRelease
from elasticlib.workers.child._exiting import ExitAction, ExitCourse, Stage
from elasticlib.workers.spawner import _kernel_facts, _stuck
from elasticlib.workers.spawner._detached import Detached
from elasticlib.workers.spawner._stack_dump import StackDump, StackRequest, shared_text
from elasticlib.workers.spawner._stuck import RoundStop


class Left:
    """The files of one worker; `close` once the launcher has them."""

    def __init__(self) -> None:
        report, self.faults, self.tail = map(processes.anonymous_file, ("report", "faults", "tail"))
        self._reports = [report]

    @property
    def report(self) -> int:
        """File for the worker's result or error."""
        return self._reports[0]

    def reports(self) -> tuple[int, ...]:
        """Return all files that hold the report."""
        return tuple(self._reports)

    def all(self) -> tuple[int, ...]:
        """Return the report, the stacks of a crash, the last lines of stderr, and further files of the report."""
        return self.report, self.faults, self.tail, *self._reports[1:]

    def put_report(self, packed: bytes) -> None:
        """Store a report that came through the pipe, because it was too large for the worker's file."""
        # Without a free descriptor the launcher finds that the report is missing.
        with contextlib.suppress(OSError):
            former, self._reports = self._reports, files_with_content(packed, "report")
            close_each(former)

    def close(self) -> None:
        """Close the files."""
        close_each(self.all())


@dataclass
class WorkerProcess:
    """A worker that was started and not reaped."""

    round: int
    local_rank: int
    pid: int
    handle: processes.Handle
    left: Left
    course: ExitCourse
    was_signalled: bool = False
    """True if it was sent the stop signal while that could change its status."""
    signum: int = 0
    """The last stop signal that it was sent."""
    _stacks: StackRequest | None = None
    """The last request of `dump`."""
    written: int = 0
    """Bytes that it had written at the last look."""

    def seen(self) -> tuple[int, int, processes.Handle, int]:
        """Return its data for `StackDump`."""
        return self.local_rank, self.pid, self.handle, self.left.faults

    def may_be_sampled(self) -> bool:
        """
        Return True for the first worker while only its main thread runs, and can answer at once.

        A signal would interrupt a system call of a sleeping thread, and stacks of other running
        threads change during a look.
        """
        can_answer = self.local_rank == 0 and catches(self.pid, _child.STACKS_SIGNAL)
        return can_answer and _kernel_facts.only_main_thread_runs(self.pid)

    def ask(self, signum: int) -> None:
        """Send it the stop signal; continue it if it is stopped, so that it handles the signal."""
        if not self.was_signalled:
            self.was_signalled = not self._is_at_its_end()
        self.signum = signum
        if self.course.for_group or signum == signal.SIGKILL:
            self.send_group(signum)
        elif not self._leaves_by_itself(signum):
            signal_process(self.handle, signum)
        # A stopped process handles a signal only after it continues.
        self.send_group(signal.SIGCONT)

    def _is_at_its_end(self) -> bool:
        """Return True if no signal changes its status any more."""
        if self.course.overdue or self.course.program.is_final:
            return True
        # A peer may report a closed connection before the dead process is a zombie.
        return is_ending(self.pid)

    def _leaves_by_itself(self, signum: int) -> bool:
        """
        Return True if its function had returned: *signum*, which it does not handle, would cut
        its exit handlers off.
        """
        return self.course.was_waiting and not catches(self.pid, signum)

    def send_group(self, signum: int) -> None:
        """Signal its group; SIGKILL spares the process that removes its shared memory."""
        if signum != signal.SIGKILL or not any(map(is_memory_cleaner, self._group())):
            signal_group(self.pid, self.handle, signum)
            return
        # Stopped first, so that none forks while they are killed one by one.
        signal_group(self.pid, self.handle, signal.SIGSTOP)
        for pid in self._group():
            signal_descendant(os.getpid(), pid, signal.SIGCONT if is_memory_cleaner(pid) else signal.SIGKILL)
        # By its own handle: there may be no free descriptor for the handles above.
        signal_process(self.handle, signal.SIGKILL)

    def signal_group(self) -> None:
        """Send the stop signal to the processes that it started in its group, but not to itself again."""
        for pid in self.others_in_group():
            signal_descendant(os.getpid(), pid, self.signum)
            signal_descendant(os.getpid(), pid, signal.SIGCONT)

    def signal_group_unless_writing(self) -> None:
        """Do as `signal_group`, or later: the worker could not save without its children."""
        if self.is_writing():
            self.course.postpone_group(monotonic())
        else:
            self.signal_group()

    def has_lost_its_group(self) -> bool:
        """Return True if no process of its group is left that could handle the signal."""
        left = self.others_in_group()
        if not left:
            return True
        # Processes that ignore the signal may end for other reasons: they get some time, too.
        had_their_time = self.course.patience_is_over(monotonic())
        return had_their_time and all(ignores(pid, self.signum) for pid in left)

    def kill(self) -> None:
        """SIGKILL it and its group."""
        self.send_group(signal.SIGKILL)
        # Also by its handle: just forked, it may not lead a group yet.
        signal_process(self.handle, signal.SIGKILL)

    def is_writing(self) -> bool:
        """
        Return True if it has written since the last look, or has a file open for writing.

        It may be saving a checkpoint.
        """
        before, self.written = self.written, _kernel_facts.written_bytes(self.pid)
        family = [self.pid, *_kernel_facts.children(self.pid)]
        return self.written > before or any(map(_kernel_facts.has_own_file, family))

    def others_in_group(self) -> list[int]:
        """Return the living processes of its group, except itself and the one that removes its shared memory."""
        living = [pid for pid in self._group() if pid != self.pid and not is_ending(pid)]
        return [pid for pid in living if not is_memory_cleaner(pid)]

    def _group(self) -> list[int]:
        return _kernel_facts.group(os.getpid(), self.pid)

    def dump(self) -> None:
        """Request the stacks of all its threads."""
        self._stacks = StackRequest(self.pid, self.handle, self.left.faults)
        self._stacks.send(is_alone=False)

    def stacks(self) -> str | None:
        """Return the stacks that `dump` requested; None until they are complete."""
        return None if self._stacks is None else self._stacks.text()

    def pass_on(self, signum: int) -> None:
        """Send it *signum* if it handles that; otherwise the signal would end it."""
        if not self.course.for_group:
            # Its children have its handler too, if they were forked after it was set, and nothing
            # to save.
            if catches(self.pid, signum):
                signal_process(self.handle, signum)
            return
        for pid in self._group():
            if catches(pid, signum):
                signal_descendant(os.getpid(), pid, signum)

    def close(self) -> None:
        """Close its handle and its files."""
        self.handle.close()
        self.left.close()


@dataclass(eq=False)
class LiveWorkers:
    """
    The workers of a round that have not ended, and the steps to their ends.

    The launcher gets a report of each end, with the worker's files.
    """

    _launcher: Channel
    _selector: selectors.BaseSelector
    _detached: Detached
    _all_ended: Callable[[], None]
    """Called after the end of the last one."""
    _stacks: StackDump
    """The look at their stacks, which must know of their ends."""
    round: int = -1
    are_functions: bool = False
    """True if they call a function, and are no scripts or programs."""
    survivors: list[int] = field(default_factory=list)
    """Process ids of workers of this round that not even SIGKILL ended."""
    notices: Notices = field(default_factory=Notices)
    """The outcomes that they announce."""
    release: RoundRelease = field(default_factory=RoundRelease)
    """The release of functions that have returned."""
    _live: dict[int, WorkerProcess] = field(default_factory=dict)
    _stopping: RoundStop | None = None
    """Record of workers that are slow to end."""

    def listen(self) -> None:
        """Open the pipe through which workers announce the outcomes of their programs."""
        self.notices.open()
        self._selector.register(self.notices.fileno(), selectors.EVENT_READ, self.read_notices)

    def begin_round(self, number: int) -> None:
        """Forget the round before."""
        self.round = number
        self.survivors = []

    def add(self, worker: WorkerProcess) -> None:
        """Watch a *worker* that was just started."""
        self._live[worker.local_rank] = worker
        self._selector.register(worker.handle, selectors.EVENT_READ, lambda: self._ended(worker))

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return {rank: worker.pid for rank, worker in self._live.items()}

    def living(self) -> list[WorkerProcess]:
        """Return all."""
        return list(self._live.values())

    def any_left(self) -> bool:
        """Return True until the last one has ended."""
        return bool(self._live)

    def all_ended_well(self) -> bool:
        """Return True if the programs of all that are left have announced their success."""
        # A program that has just announced it counts.
        self.read_notices()
        return all(each.course.program.ended_well() for each in self._live.values())

    def own(self) -> list[int]:
        """Return the descriptors here that a new worker must not hold."""
        own = [*self.release.own()]
        for worker in self._live.values():
            own += worker.left.all()
        return own

    # Requests of the launcher.

    def signal(self, number: int, local_rank: int, signum: int) -> None:
        """Signal the group of a worker of round *number*."""
        worker = self._live.get(local_rank)
        # The order may have been sent before the launcher knew the round's end.
        if worker is not None and number == self.round:
            worker.send_group(signum)

    def pass_on(self, signum: int, local_ranks: Sequence[int]) -> None:
        """Send *signum* to those workers of *local_ranks* that handle it."""
        for rank in self._live.keys() & set(local_ranks):
            self._live[rank].pass_on(signum)

    def stop(self, signum: int, grace: float, spare: bool) -> None:
        """
        Stop all with *signum*, and after *grace* seconds with SIGKILL.

        With *spare* those whose programs failed keep the time for their exit handlers.
        """
        # A worker that failed, or waits for others, may just have announced it.
        self.read_notices()
        self.release.give()
        now = monotonic()
        is_another = self._stopping is None or self._stopping.signum != signum
        if is_another:
            self._stopping = RoundStop(signum, now, restart_waits=spare)
        for worker in self._live.values():
            must_be_signalled = worker.course.stop(grace, now, spare)
            # Not a second time: a program may take a second signal for an order to end at once.
            if must_be_signalled and worker.signum != signum:
                worker.ask(signum)

    # What is due.

    def due(self) -> list[float]:
        """Return the times at which `look` has work."""
        due = [each.course.deadline for each in self._live.values() if each.course.deadline is not None]
        if self._stopping is not None:
            due.append(self._stopping.next_look)
        return due

    def look(self) -> None:
        """Take the actions that are due."""
        # A copy, because an end removes its worker.
        for worker in self.living():
            self._look_at(worker)
        if self._stopping is not None and monotonic() >= self._stopping.next_look:
            self._look_for_stuck(self._stopping)

    def _look_at(self, worker: WorkerProcess) -> None:
        """Take the actions that are due for a worker which is slow to end."""
        course = worker.course
        if course.deadline is None or monotonic() < course.deadline:
            return
        stacks = worker.stacks()
        has_returned = _showing.has_returned(stacks or "")
        for act in course.due(monotonic(), stacks is not None, has_returned):
            self._do(act, worker, stacks or "")

    def _do(self, act: ExitAction, worker: WorkerProcess, stacks: str) -> None:
        course = worker.course
        match act:
            case ExitAction.DUMP:
                worker.dump()
            case ExitAction.REPORT_OVERDUE:
                self._report_with_stacks("lingers", worker, stacks, seconds=course.exit_timeout, ends=course.overdue)
            case ExitAction.REPORT_LAST_RUNS:
                seconds, left = course.time_of_last_runs(monotonic())
                self._report_with_stacks("last_runs", worker, stacks, seconds=seconds, left=left)
            case ExitAction.TERM:
                worker.ask(signal.SIGTERM)
            case ExitAction.SIGNAL_GROUP:
                worker.signal_group_unless_writing()
            case ExitAction.LOOK_AT_GROUP:
                if worker.has_lost_its_group():
                    self._reap(worker)
            case ExitAction.END_GROUP:
                self._reap(worker)
            case ExitAction.KILL:
                worker.kill()
            case ExitAction.GIVE_UP:
                self._give_up(worker)

    def _give_up(self, worker: WorkerProcess) -> None:
        # It is in uninterruptible sleep: a later sweep reaps it, if it ever ends.
        self.survivors.append(worker.pid)
        self._selector.unregister(worker.handle)
        self._forget(worker)

    def _look_for_stuck(self, stop: RoundStop) -> None:
        """End a worker in native code, if that may free the others for their own ends."""
        signalled = {rank: each for rank, each in self._live.items() if each.course.stage is Stage.SIGNALLED}
        if not signalled:
            self._stopping = None
            return

        looks = {rank: _stuck.look(worker.pid, stop.signum) for rank, worker in signalled.items()}
        rank = stop.stuck(looks, monotonic())
        if rank is None:
            return

        worker = signalled[rank]
        self._report("stuck", worker, waited=monotonic() - stop.began)
        worker.send_group(signal.SIGKILL)

    # Outcomes and ends.

    def read_notices(self) -> None:
        """Read the workers' announcements on the outcomes of their programs."""
        data = self.notices.receive()
        if not data:
            return
        self._take_notices(data)
        if any(each.course.waits() for each in self._live.values()):
            self._look_who_runs()

    def _take_notices(self, data: bytes) -> None:
        workers = {each.pid: each for each in self._live.values()}
        for pid, outcome, status in self.notices.take(data):
            if pid in workers:
                self._note_outcome(workers[pid], outcome, status)

    def _note_outcome(self, worker: WorkerProcess, outcome: ProgramOutcome, status: int) -> None:
        report = self.notices.report_of(worker.pid)
        if report:
            # No file could hold the report: it came through the pipe.
            worker.left.put_report(report)
        if worker.course.announced(outcome, status, monotonic()):
            self._report("failed", worker, worker.left.reports(), exitcode=status)

    def _ended(self, worker: WorkerProcess) -> None:
        # Its announcements before its end count, and are in the pipe by now.
        self.read_notices()
        # It stays a zombie until its group is killed: so no other process has its number.
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        self._selector.unregister(worker.handle)
        if worker.others_in_group() and worker.course.leaves_time_to_group(monotonic()):
            # Processes of a group that is signalled as a whole have the signal already.
            if not worker.course.for_group:
                worker.signal_group()
        else:
            self._reap(worker)

    def _reap(self, worker: WorkerProcess) -> None:
        # Kill the group while the leader is a zombie: its pid, hence the group's, is not free yet.
        worker.send_group(signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        facts = worker.course.facts_of_end(os.waitstatus_to_exitcode(status))
        self._detached.succeeded = self._detached.succeeded and facts["exitcode"] == 0
        self._report("exited", worker, worker.left.all(), told=worker.was_signalled, **facts)
        self._forget(worker)

    def _forget(self, worker: WorkerProcess) -> None:
        self._stacks.end(worker.local_rank)
        worker.close()
        # A worker may be killed in the middle of its report.
        self.notices.report_of(worker.pid)
        del self._live[worker.local_rank]
        if self._live:
            self._look_who_runs()
        else:
            self._stopping = None
            self._all_ended()

    def _look_who_runs(self) -> None:
        """Release functions that have returned when all have; note the last running worker."""
        now = monotonic()
        running = [each.course for each in self._live.values() if not each.course.waits()]
        if not running:
            self.release.give()
            for each in self._live.values():
                each.course.release(now)
        elif len(running) == 1 and self._detached.succeeded:
            running[0].note_others_finished(now, is_function=self.are_functions)

    def _report(self, what: str, worker: WorkerProcess, descriptors: tuple[int, ...] = (), **facts: object) -> None:
        message = {"op": what, "round": worker.round, "local_rank": worker.local_rank, "pid": worker.pid}
        self._launcher.send(message | facts, descriptors)

    def _report_with_stacks(self, what: str, worker: WorkerProcess, stacks: str, **facts: object) -> None:
        with shared_text(stacks) as memories:
            self._report(what, worker, memories, **facts)
