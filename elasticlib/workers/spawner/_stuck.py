"""
Workers that will not return to Python, as opposed to those that handle the signal that stops
them.

CPython only notes a signal when it arrives, in a table of the interpreter (``tripped``). The
program's handler, or `KeyboardInterrupt`, follows when the main thread returns from native code.
A rank that waits for its peers in a collective never returns unless one of them ends. So a stop
reads that table, from outside and without a change of the worker. A worker that has noted the
signal, and has begun nothing since, is *deaf*.

Another worker that is still at work may free a deaf one. So none is *stuck* while one on this
machine is not deaf, uses the processor, or waits for a disk. The end of a worker must help
another one that waits, or a restart. A worker that writes, as its bytes or an open file show,
waits for no other and keeps its time.

Rules of this file: a worker that cannot be read is not stuck. It sends no signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its handlers are those of the table, not made nicer
import ctypes
import enum
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
"""
Seconds for which all workers must have been deaf and idle, if the signal would raise
`KeyboardInterrupt`.
"""
STUCK_WITH_HANDLERS = 10.0
"""The same if the program has a handler of its own, such as one that saves a checkpoint."""
_PAUSE = 0.5
"""Seconds in which the end of one worker may free the others."""
_IDLE = 0.05
"""Share of a processor that a waiting process may use."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_ENTRY = struct.Struct("i4xP")
"""An entry of CPython's table of signals: a flag for a noted signal, and the handler."""
_POINTER = struct.Struct("P")
_HANDLER = _ENTRY.size - _POINTER.size


@dataclass(frozen=True)
class UnhandledSignal:
    """A worker that has not begun to handle the signal."""

    cpu: float
    """Seconds of processor time that the process has used."""
    sleeps: bool
    """True if its main thread waits, but not for a disk."""
    own_handler: bool
    """True if the program has a handler of its own for the signal."""
    written: int = 0
    """Bytes that the process has written."""
    own_file: bool = False
    """True if it or a child of it has a file of its own open for writing."""


@dataclass
class RoundStop:
    """The workers of one round while *signum* stops them; *began* is the time of the signal."""

    signum: int
    began: float
    restart_waits: bool = False
    """True if the next round waits for all ends; otherwise the last worker keeps its whole time."""
    next_look: float = field(init=False)
    """Time for the next call of `stuck`."""
    _idle: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By local rank: since when it is deaf and idle, and its processor time at that moment."""
    _wrote: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By local rank: the time of the last growth of its written bytes, and their number."""
    _since: float = field(init=False)
    """Time when the last worker that was not deaf was seen, or of the signal."""
    _ended: float | None = None
    """Time when `stuck` last named a worker."""

    def __post_init__(self) -> None:
        self.next_look, self._since = self.began + INTERVAL, self.began

    def stuck(self, looks: Mapping[int, UnhandledSignal | None], now: float) -> int | None:
        """
        Return the local rank that must be killed now to help the others; None for none.

        *looks* holds a look at each living worker, None for one that is not deaf. The result is
        the last rank, because the first one often has data to save.
        """
        self.next_look = now + INTERVAL
        deaf: dict[int, UnhandledSignal] = {}
        for rank, seen in looks.items():
            if seen is None:
                self._note_one_at_work(now)
                return None
            deaf[rank] = seen
            self._note_deaf(rank, seen, now)

        if not deaf or self._has_just_ended_one(now):
            return None
        if not self._all_had_their_time(deaf, now):
            return None

        waiting = [rank for rank, seen in deaf.items() if not self._writes(rank, seen, now)]

        # The end of a single one would free no other: the others write, and wait for no peer.
        least = 1 if self.restart_waits else 2
        if len(waiting) < least:
            return None

        self._ended = now
        return max(waiting)

    def _note_one_at_work(self, now: float) -> None:
        """Begin again: a worker at work may still free the others."""
        self._idle.clear()
        self._since = now

    def _note_deaf(self, rank: int, seen: UnhandledSignal, now: float) -> None:
        """Note since when a deaf worker is idle."""
        grows = self._grows(rank, seen.written, now)
        begin, used = self._idle.get(rank, (self._since, seen.cpu))
        # The kernel counts whole ticks, of two kinds: each of them may be a rounded part of one.
        allowed = 2 * _TICK + _IDLE * (now - begin)
        works = not seen.sleeps or seen.cpu - used > allowed
        # A writer may free the others when it is done; a waiting restart does not wait for that.
        saves = grows and not self.restart_waits
        if works or saves:
            begin, used = now, seen.cpu
        self._idle[rank] = begin, used

    def _has_just_ended_one(self, now: float) -> bool:
        return self._ended is not None and now - self._ended < _PAUSE

    def _all_had_their_time(self, deaf: Mapping[int, UnhandledSignal], now: float) -> bool:
        has_handlers = any(seen.own_handler for seen in deaf.values())
        limit = STUCK_WITH_HANDLERS if has_handlers else STUCK
        last_idle_since = max(self._idle[rank][0] for rank in deaf)
        return now - last_idle_since >= limit

    def _grows(self, rank: int, written: int, now: float) -> bool:
        """Return True if the worker has written more bytes than at the last look."""
        last = self._wrote.get(rank)
        if last is None:
            self._wrote[rank] = -math.inf, written
            return False
        if last[1] == written:
            return False
        self._wrote[rank] = now, written
        return True

    def _writes(self, rank: int, seen: UnhandledSignal, now: float) -> bool:
        grew_at, _ = self._wrote[rank]
        return seen.own_file or now - grew_at < STUCK


def look(pid: int, signum: int) -> UnhandledSignal | None:
    """
    Look at *pid*, which was sent *signum*; None if it has begun to handle the signal, or cannot
    be read.
    """
    facts = process_facts(pid)
    layout = _layout()
    if facts is None or layout is None:
        return None

    handler = _handler_that_waits(pid, signum, layout)
    if handler is None:
        return None

    # Fields 14 and 15 of proc(5): ticks of the processor in the program, and for it in the kernel.
    cpu = (int(facts[11]) + int(facts[12])) * _TICK

    # A checkpoint may be written by a child while the worker waits for its peers.
    family = [pid, *_kernel_facts.children(pid)]
    return UnhandledSignal(
        cpu=cpu,
        sleeps=facts[0] == b"S",
        own_handler=handler is _Handler.OWN,
        written=_kernel_facts.written_bytes(pid),
        own_file=any(map(_kernel_facts.has_own_file, family)),
    )


class _Handler(enum.Enum):
    """The kind of a Python handler of a signal."""

    RAISES = enum.auto()
    """Python's own handler: it raises `KeyboardInterrupt`."""
    OWN = enum.auto()
    """The program's own handler."""


def _handler_that_waits(pid: int, signum: int, layout: _Layout) -> _Handler | None:
    """Return the kind of handler that waits for the main thread of *pid*; None without one."""
    try:
        begin = next(part.begin for part in _memory(pid) if part.file == layout.file)
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, StopIteration):
        # Not this interpreter, another user's process, or a kernel that hides its memory.
        return None

    try:
        entry = os.pread(memory, _ENTRY.size, begin + layout.table + signum * _ENTRY.size)
        waits, handler = _ENTRY.unpack(entry)
        if waits != 1:
            return None
        code = os.pread(memory, _POINTER.size, handler + object.__basicsize__)
        interrupt = _POINTER.pack(begin + layout.interrupt)
    except (OSError, struct.error, OverflowError):
        return None
    finally:
        os.close(memory)

    is_pythons = signum == signal.SIGINT and code == interrupt
    return _Handler.RAISES if is_pythons else _Handler.OWN


@dataclass(frozen=True)
class _Layout:
    """Places in an interpreter, in bytes from the beginning of its file in memory."""

    file: str
    table: int
    interrupt: int
    """The code of ``signal.default_int_handler``, to which that object points."""


@functools.cache
def _layout() -> _Layout | None:
    """Return the layout of this process's interpreter; None if it is not built as expected."""
    handlers = _handlers()

    # Only CPython has this table.
    if sys.implementation.name != "cpython" or signal.SIGINT not in handlers:
        return None

    # The first field of a built-in function, after the head of the object, points to its
    # definition.
    interrupt = id(_signal.default_int_handler) + object.__basicsize__
    code = _POINTER.unpack(ctypes.string_at(interrupt, _POINTER.size))[0]
    found = []
    for part in _memory(os.getpid()):
        data = ctypes.string_at(part.start, part.end - part.start)
        for table in _tables_in(data, handlers):
            found.append(_Layout(part.file, part.start + table - part.begin, code - part.begin))

    # If two places look like the table, it is not known which one it is.
    return found[0] if len(found) == 1 else None


def _handlers() -> dict[int, bytes]:
    """Return the pointers to the handlers of this process, by signal."""
    found = {}
    for number in map(int, signal.valid_signals()):
        handler = _signal.getsignal(number)
        if handler is not None:
            found[number] = _POINTER.pack(id(handler))
    return found


def _tables_in(data: bytes, handlers: Mapping[int, bytes]) -> Iterator[int]:
    """Yield the places in *data* where a table with these *handlers* may begin."""
    place = data.find(handlers[signal.SIGINT])
    while place >= 0:
        table = place - _HANDLER - _ENTRY.size * signal.SIGINT
        if table >= 0 and _has_handlers(data, table, handlers):
            yield table
        place = data.find(handlers[signal.SIGINT], place + 1)


def _has_handlers(data: bytes, table: int, handlers: Mapping[int, bytes]) -> bool:
    for number, handler in handlers.items():
        if not data.startswith(handler, table + _ENTRY.size * number + _HANDLER):
            return False
    return True


@dataclass(frozen=True)
class _Region:
    """
    A region of a process's memory that belongs to its interpreter's files and can be written to.
    """

    file: str
    begin: int
    """Address of the beginning of this file in memory."""
    start: int
    end: int


def _memory(pid: int) -> Iterator[_Region]:
    program = os.path.realpath(f"/proc/{pid}/exe")
    begins: dict[str, int] = {}
    former_file, former_end = "", 0
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            start, end, access, file = _parsed_mapping(line)
            if not file and former_end == start:
                # Variables without a first value (.bss) follow those with one, in a mapping
                # without a name.
                file = former_file

            if not _is_of_interpreter(file, program):
                continue
            begin = begins.setdefault(file, start)
            former_file, former_end = file, end
            if access.startswith("rw"):
                yield _Region(file, begin, start, end)


def _parsed_mapping(line: str) -> tuple[int, int, str, str]:
    """
    Return start, end, access and file of a *line* of ``/proc/pid/maps``; an empty file for none.
    """
    span, access, _, _, _, *names = line.split(maxsplit=5)
    start, end = (int(text, 16) for text in span.split("-"))
    file = names[0].rstrip("\n") if names else ""
    return start, end, access, file


def _is_of_interpreter(file: str, program: str) -> bool:
    is_library = os.path.basename(file).startswith("libpython")
    return bool(file) and (file == program or is_library)
