"""
The stacks of workers' threads while they run, on request of the program that holds the job, or
for `ImportWatch`.

A worker's fault handler, which is installed before any of the user's code, writes them when a
signal arrives. It works in C, without the interpreter's lock, and writes to memory that the
spawner shares.

Rules of this file:

* A process that would die of the signal does not get it.
* A worker that does not answer within the limit is reported with the reason, and delays no other.
* Stacks are removed after they were read. A late answer stays until the next request.
* The report of an end has only the stacks of a crash, or of an overdue end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticlib import processes
from elasticlib.processes import close_each, files_with_content, process_facts, signal_process
from elasticlib.stacks import with_heading
from elasticlib.workers.child import _report
from elasticlib.workers.spawner import _kernel_facts

LIMIT = 0.7
"""Seconds for a worker's answer: less than the second that callers wait for all."""
_UNTIL_QUIET = 0.3
"""Seconds to wait for a moment in which no thread but the main one runs."""
_LOOK = 0.01
_OTHERS_RUN = "\n(other threads run Python or native code, so only this one can be read safely)\n"
_STATES = {
    b"T": "the process is stopped, by a signal or a debugger",
    b"t": "the process is held by a debugger",
    b"D": "the process is in uninterruptible sleep, most likely in a driver or a file system",
    b"Z": "the process has ended",
}


@dataclass
class _Worker:
    pid: int
    handle: processes.Handle
    faults: int
    """The memory to which its fault handler writes."""
    until: float
    """Time by which it must have answered."""
    was_signalled: bool = False
    is_alone: bool = False
    """True if it writes the stack of one thread only."""
    size: int = 0
    """Bytes at the last look."""
    text: str | None = None


class StackDump:
    """One look at a time at the stacks of workers."""

    def __init__(self) -> None:
        self.next_look: float | None = None
        """Time for the next call of `look`; None if no look is in progress."""
        self.askers: list[str] = []
        """Names of the askers of the present look, or the last one."""
        self._signums = (0, 0)
        self._workers: dict[int, _Worker] = {}

    def begin(
        self,
        workers: Iterable[tuple[int, int, processes.Handle, int]],
        signums: tuple[int, int],
        now: float,
        asker: str = "",
    ) -> None:
        """
        Begin a look at these workers, or add them to the one in progress.

        Each is local rank, pid, handle, and the memory of the fault handler. *signums* are the signals for the stacks
        of all threads, and for that of the thread that handles it.
        """
        if self.next_look is None:
            self.askers, self._signums, self.next_look = [], signums, now
        if asker not in self.askers:
            self.askers.append(asker)
        for rank, pid, handle, faults in workers:
            self._workers.setdefault(rank, _Worker(pid, handle, faults, now + LIMIT))

    def end(self, rank: int) -> None:
        """Note that this worker has ended, and its descriptors are closed."""
        if rank in self._workers and self._workers[rank].text is None:
            self._workers[rank].text = f"({_STATES[b'Z']})"

    def look(self, now: float) -> dict[int, str] | None:
        """
        Return the stacks by local rank, or in brackets the reason for none.

        None while some may still arrive.
        """
        for worker in self._workers.values():
            if worker.text is None:
                self._look_at(worker, now)
        if any(worker.text is None for worker in self._workers.values()):
            self.next_look = now + _LOOK
            return None
        found = {rank: worker.text or "" for rank, worker in self._workers.items()}
        self._workers, self.next_look = {}, None
        return found

    def _look_at(self, worker: _Worker, now: float) -> None:
        is_over = now >= worker.until
        is_paused = _is_paused(worker.pid)
        if worker.was_signalled:
            _take_answer(worker)
        elif not is_paused:
            # A paused process would answer only after it continues, which would take too long.
            self._signal(worker, now)
        if worker.text is None and (is_over or is_paused):
            worker.text = f"({_reason_for_none(worker)})"

    def _signal(self, worker: _Worker, now: float) -> None:
        if not all(_kernel_facts.catches(worker.pid, signum) for signum in self._signums):
            # Without a handler the process would die of the signal.
            return
        # The fault handler reads the frames of all threads without the interpreter's lock. If another
        # thread changes its own at that moment, the worker ends by SIGSEGV.
        worker.is_alone = _kernel_facts.other_threads_run(worker.pid)
        if worker.is_alone and now < worker.until - LIMIT + _UNTIL_QUIET:
            return
        worker.was_signalled = True
        clear(worker.faults)
        of_all, of_one = self._signums
        signal_process(worker.handle, of_one if worker.is_alone else of_all)


def _take_answer(worker: _Worker) -> None:
    """
    Read the stacks once two looks have found the same size: the handler writes without a pause.
    """
    former = worker.size
    worker.size = os.fstat(worker.faults).st_size
    if 0 < worker.size == former:
        text = _report.read_text(worker.faults)
        if worker.is_alone:
            text = with_heading(text) + _OTHERS_RUN
        worker.text = text
        clear(worker.faults)


def _reason_for_none(worker: _Worker) -> str:
    facts = process_facts(worker.pid)
    state = b"Z" if facts is None else facts[0]
    if state in _STATES:
        return _STATES[state]
    if worker.was_signalled:
        return "no answer"
    return "it runs no Python that could tell, or is just being started"


def _is_paused(pid: int) -> bool:
    """Return True if the process is stopped: it cannot answer before it continues."""
    facts = process_facts(pid)
    return facts is not None and facts[0] in (b"T", b"t")


def clear(descriptor: int) -> None:
    """Empty the memory; worker and spawner share the position for writing."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)


@contextlib.contextmanager
def shared_text(stacks: str) -> Iterator[tuple[int, ...]]:
    """
    Yield files with the text, for the launcher; none if no descriptor is free.

    The message is sent even without the text.
    """
    try:
        memories = files_with_content(stacks.encode(), "stacks")
    except OSError:
        memories = []
    try:
        yield tuple(memories)
    finally:
        close_each(memories)
