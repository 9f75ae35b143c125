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
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticlib import processes
from elasticlib.processes import catches, close_each, files_with_content, is_paused, process_facts, signal_process
from elasticlib.stacks import with_heading
from elasticlib.workers.child import _child, _report
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
class StackRequest:
    """A request to one worker for its stacks, from the signal to the whole text."""

    pid: int
    handle: processes.Handle
    faults: int
    """The memory to which its fault handler writes."""
    until: float = math.inf
    """Time by which it must have answered."""
    was_sent: bool = False
    is_alone: bool = False
    """True if it writes the stack of one thread only."""
    _size: int = -1
    """Bytes at the last look."""

    def send(self, *, is_alone: bool) -> None:
        """
        Ask for the stacks of all threads, or of the main thread alone.

        A program without a handler gets no signal, because it would die of it.
        """
        _clear(self.faults)
        signum = _child.OWN_STACK_SIGNAL if is_alone else _child.STACKS_SIGNAL
        if catches(self.pid, signum):
            self.was_sent, self.is_alone, self._size = True, is_alone, -1
            signal_process(self.handle, signum)

    def text(self) -> str | None:
        """Return the stacks; None until they are complete."""
        if not self.was_sent:
            return None
        # Two looks find the same size only after the last write: the handler writes without a pause.
        former, self._size = self._size, os.fstat(self.faults).st_size
        is_whole = 0 < self._size == former
        if not is_whole:
            return None
        text = _report.read_text(self.faults)
        return with_heading(text) + _OTHERS_RUN if self.is_alone else text


class StackDump:
    """One look at a time at the stacks of workers."""

    def __init__(self) -> None:
        self.next_look: float | None = None
        """Time for the next call of `look`; None if no look is in progress."""
        self.askers: list[str] = []
        """Names of the askers of the present look, or the last one."""
        self._waiting: dict[int, StackRequest] = {}
        """By local rank, the requests that have no answer yet."""
        self._found: dict[int, str] = {}

    def begin(
        self,
        workers: Iterable[tuple[int, int, processes.Handle, int]],
        now: float,
        asker: str = "",
    ) -> None:
        """
        Begin a look at these workers, or add them to the one in progress.

        Each is local rank, pid, handle, and the memory of the fault handler.
        """
        if self.next_look is None:
            self.askers, self.next_look = [], now
        if asker not in self.askers:
            self.askers.append(asker)
        for rank, pid, handle, faults in workers:
            if rank not in self._found:
                self._waiting.setdefault(rank, StackRequest(pid, handle, faults, now + LIMIT))

    def end(self, rank: int) -> None:
        """Note that this worker has ended, and its descriptors are closed."""
        if self._waiting.pop(rank, None) is not None:
            self._found[rank] = f"({_STATES[b'Z']})"

    def look(self, now: float) -> dict[int, str] | None:
        """
        Return the stacks by local rank, or in brackets the reason for none.

        None while some may still arrive.
        """
        for rank, request in list(self._waiting.items()):
            text = _look_at(request, now)
            if text is not None:
                self._found[rank] = text
                del self._waiting[rank]

        if self._waiting:
            self.next_look = now + _LOOK
            return None

        found, self._found, self.next_look = self._found, {}, None
        return dict(sorted(found.items()))


def _look_at(request: StackRequest, now: float) -> str | None:
    """Return the answer to *request*, or the reason for none; None while it may still arrive."""
    text = request.text()
    if text is not None:
        _clear(request.faults)
        return text

    cannot_answer = is_paused(request.pid)

    # A paused process would answer only after it continues, which would take too long.
    if not cannot_answer and not request.was_sent:
        _ask(request, now)
    if cannot_answer or now >= request.until:
        return f"({_reason_for_none(request)})"

    return None


def _ask(request: StackRequest, now: float) -> None:
    # The fault handler reads the frames of all threads without the interpreter's lock. If another
    # thread changes its own at that moment, the worker ends by SIGSEGV.
    others_run = _kernel_facts.other_threads_run(request.pid)
    may_wait = now < request.until - LIMIT + _UNTIL_QUIET
    if not (others_run and may_wait):
        request.send(is_alone=others_run)


def _reason_for_none(request: StackRequest) -> str:
    facts = process_facts(request.pid)
    state = b"Z" if facts is None else facts[0]
    if state in _STATES:
        return _STATES[state]
    if request.was_sent:
        return "no answer"
    return "it runs no Python code that could answer, or has just started"


def _clear(descriptor: int) -> None:
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
