"""
A worker's process and its group, as the spawner signals them, and the files in which it leaves
its report.

A stop signal is sent to the worker alone while the worker can forward it. Its children, such as
those of a DataLoader, would die first, and the worker's handler could not save. They get it when
the worker has ended, or after half of the time.

Rules of this file: the group is signalled by its number only until the worker, its leader, is
reaped.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from elasticlib import processes
from elasticlib.processes import (
    close_each,
    files_with_content,
    is_ending,
    is_memory_cleaner,
    signal_descendant,
    signal_group,
    signal_process,
)
from elasticlib.workers.child import _child
from elasticlib.workers.child._exiting import ExitCourse
from elasticlib.workers.spawner import _kernel_facts
from elasticlib.workers.spawner._stack_dump import StackRequest


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
        """
        Return the report, the stacks of a crash, the last lines of stderr, and further files of
        the report.
        """
        return self.report, self.faults, self.tail, *self._reports[1:]

    def put_report(self, packed: bytes) -> None:
        """
        Store a report that came through the pipe, because it was too large for the worker's file.
        """
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
        can_answer = self.local_rank == 0 and _kernel_facts.catches(self.pid, _child.STACKS_SIGNAL)
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
        return self.course.was_waiting and not _kernel_facts.catches(self.pid, signum)

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

    def ask_group(self) -> None:
        """
        Send the stop signal to the processes that it started in its group, but not to itself
        again.
        """
        for pid in self.others_in_group():
            signal_descendant(os.getpid(), pid, self.signum)
            signal_descendant(os.getpid(), pid, signal.SIGCONT)

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
        """
        Return the living processes of its group, except itself and the one that removes its
        shared memory.
        """
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
            if _kernel_facts.catches(self.pid, signum):
                signal_process(self.handle, signum)
            return
        for pid in self._group():
            if _kernel_facts.catches(pid, signum):
                signal_descendant(os.getpid(), pid, signum)

    def close(self) -> None:
        """Close its handle and its files."""
        self.handle.close()
        self.left.close()
