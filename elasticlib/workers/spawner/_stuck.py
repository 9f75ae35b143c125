"""
Which workers will not return to Python: told from those that are at work on the signal which stops them.

CPython only notes a signal when it comes, in a table of the interpreter (``tripped``); the program's handler, or
`KeyboardInterrupt`, follows when the main thread is back from native code. A rank that waits for its peers in a
collective never comes back unless one of them goes. So a stop looks at that table, from outside and without a change of
the worker: who has taken note, and has begun nothing since, is *deaf*.

A deaf worker may be saved by a brother that is still at work, so none is *stuck* as long as one on this machine is not
deaf, uses the processor, or waits for a disk. To end one must serve somebody: another one that waits, or a restart.
Who is writing, as its bytes or a file that it has open show, waits for nobody and keeps its time.
Rules of this file: what cannot be seen is not stuck; no signal is sent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its handlers are those of the table, not made nicer
import ctypes
import functools
import math
import os
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elasticlib.processes import process_facts
from elasticlib.workers.spawner import _kernel_facts

INTERVAL = 0.25
"""Seconds between two looks."""
STUCK = 2.0
"""Seconds that all workers must have been deaf and idle for, where the signal would raise `KeyboardInterrupt`."""
STUCK_WITH_HANDLERS = 10.0
"""The same where the program has a handler of its own, such as one that saves a checkpoint."""
_PAUSE = 0.5
"""Seconds in which the end of one may free the others."""
_IDLE = 0.05
"""Share of a processor that a waiting process may use."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_ENTRY = struct.Struct("i4xP")
"""What CPython notes of one signal: whether it waits to be handled, and the handler."""
_POINTER = struct.Struct("P")
_HANDLER = _ENTRY.size - _POINTER.size


@dataclass(frozen=True)
class Look:
    """A worker that has not begun to handle the signal."""

    cpu: float
    """Seconds of processor time that the process has used."""
    sleeps: bool
    """Whether its main thread waits, and not for a disk."""
    own_handler: bool
    """Whether the program has a handler of its own for the signal."""
    written: int = 0
    """Bytes that the process has written."""
    own_file: bool = False
    """Whether it or a child of it has a file of its own open for writing."""


@dataclass
class Stop:
    """The workers of one round while *signum* stops them, which was sent at *began*."""

    signum: int
    began: float
    restart_waits: bool = False
    """Whether the next round waits for all ends: else the last worker, which nobody waits for, has its whole time."""
    next_look: float = field(init=False)
    """When `stuck` is to be asked again."""
    _idle: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By local rank: since when it has been deaf and idle, and the processor time it had used then."""
    _wrote: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By local rank: when its bytes were last seen to grow, and how many they were."""
    _since: float = field(init=False)
    """When the last worker that was not deaf was seen, or the signal was sent."""
    _ended: float | None = None
    """When `stuck` last named one."""

    def __post_init__(self) -> None:
        self.next_look, self._since = self.began + INTERVAL, self.began

    def stuck(self, looks: Mapping[int, Look | None], now: float) -> int | None:
        """
        The local rank that must be killed now for the others' sake, given a look at all that live: None for one that
        is not deaf. It is the last one, for the first often has something to save.
        """
        self.next_look = now + INTERVAL
        for rank, seen in looks.items():
            if seen is None:
                self._idle.clear()
                self._since = now  # nobody has waited in vain as long as one may free the others
                return None
            grows = self._grows(rank, seen.written, now)
            begin, used = self._idle.get(rank, (self._since, seen.cpu))
            works = not seen.sleeps or seen.cpu - used > 2 * _TICK + _IDLE * (now - begin)
            # Who writes may free the others when it is done; a restart that waits does not wait for that.
            if works or (grows and not self.restart_waits):
                begin, used = now, seen.cpu
            self._idle[rank] = begin, used
        if not looks or (self._ended is not None and now - self._ended < _PAUSE):
            return None
        handles = any(seen is not None and seen.own_handler for seen in looks.values())
        if now - max(self._idle[rank][0] for rank in looks) < (STUCK_WITH_HANDLERS if handles else STUCK):
            return None
        waiting = [rank for rank, seen in looks.items() if seen is not None and not self._writes(rank, seen, now)]
        if len(waiting) < (1 if self.restart_waits else 2):
            return None  # its end would free nobody: the others write, and wait for no peer
        self._ended = now
        return max(waiting)

    def _grows(self, rank: int, written: int, now: float) -> bool:
        last = self._wrote.get(rank)
        if last is None or last[1] != written:
            self._wrote[rank] = (-math.inf if last is None else now), written
        return last is not None and last[1] != written

    def _writes(self, rank: int, seen: Look, now: float) -> bool:
        return seen.own_file or now - self._wrote[rank][0] < STUCK


def look(pid: int, signum: int) -> Look | None:
    """What *pid* does about *signum*; None where it has begun to handle it, or that cannot be seen."""
    facts, layout = process_facts(pid), _layout()
    if facts is None or layout is None:
        return None
    try:
        begin = next(begin for file, begin, _, _ in _memory(pid) if file == layout.file)
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, StopIteration):
        return None  # not this interpreter, another user's, or a kernel that hides it
    try:
        entry = os.pread(memory, _ENTRY.size, begin + layout.table + signum * _ENTRY.size)
        waits, handler = _ENTRY.unpack(entry)
        if waits != 1:
            return None
        code = os.pread(memory, _POINTER.size, handler + object.__basicsize__)
        raises = signum == signal.SIGINT and code == _POINTER.pack(begin + layout.interrupt)
    except (OSError, struct.error, OverflowError):
        return None
    finally:
        os.close(memory)
    cpu = (int(facts[11]) + int(facts[12])) * _TICK
    # A checkpoint may be written by a child while the worker waits for its peers.
    own_file = any(map(_kernel_facts.has_own_file, [pid, *_kernel_facts.children(pid)]))
    return Look(cpu, facts[0] == b"S", not raises, _kernel_facts.written_bytes(pid), own_file)


@dataclass(frozen=True)
class _Layout:
    """Where an interpreter has what is looked at: in bytes from the beginning of its file in memory."""

    file: str
    table: int
    interrupt: int
    """The code of ``signal.default_int_handler``, to which that object points."""


@functools.cache
def _layout() -> _Layout | None:
    """Of this process' interpreter; None where it is not built as expected."""
    handlers = {number: _signal.getsignal(number) for number in map(int, signal.valid_signals())}
    known = {number: _POINTER.pack(id(handler)) for number, handler in handlers.items() if handler is not None}
    if sys.implementation.name != "cpython" or signal.SIGINT not in known:
        return None
    code = ctypes.string_at(id(_signal.default_int_handler) + object.__basicsize__, _POINTER.size)
    found = []
    for file, begin, start, end in _memory(os.getpid()):
        data, place = ctypes.string_at(start, end - start), -1
        while (place := data.find(known[signal.SIGINT], place + 1)) >= 0:
            table = place - _HANDLER - _ENTRY.size * signal.SIGINT
            if table >= 0 and all(
                data.startswith(handler, table + _ENTRY.size * number + _HANDLER) for number, handler in known.items()
            ):
                found.append(_Layout(file, start + table - begin, _POINTER.unpack(code)[0] - begin))
    return found[0] if len(found) == 1 else None


def _memory(pid: int) -> Iterator[tuple[str, int, int, int]]:
    """What a process may write to of its interpreter's files: the file, its beginning in memory, start and end."""
    program = os.path.realpath(f"/proc/{pid}/exe")
    begins: dict[str, int] = {}
    former = ("", 0)
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, access, _, _, _, *names = line.split(maxsplit=5)
            start, end = (int(text, 16) for text in span.split("-"))
            file = names[0].rstrip("\n") if names else ""
            if not file and former[1] == start:
                file = former[0]  # variables without a first value follow those with one
            if file and (file == program or os.path.basename(file).startswith("libpython")):
                begin = begins.setdefault(file, start)
                former = file, end
                if access.startswith("rw"):
                    yield file, begin, start, end
