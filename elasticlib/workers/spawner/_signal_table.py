"""
Signals that another Python process has noted and not handled yet, read from its memory.

CPython only notes a signal when it arrives, in a table of the interpreter: an array with a flag
(``tripped``) and a handler for each signal. The program's handler, or `KeyboardInterrupt`, follows
when the main thread returns from native code. This file reads that table from outside, without a
change of the process:

1. `_layout` finds the table in this process: the place in the writable memory of the interpreter
   with a pointer to each present handler, as far apart as the entries are. It notes how far that
   place is from the beginning of the interpreter's file in memory.
2. Another process of the same interpreter has the file at another address, and the table at the
   same distance from it.

Rules of this file: a process that cannot be read, or that has another interpreter, has no noted
signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its handlers are those of the table, not made nicer
import ctypes
import enum
import functools
import os
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ENTRY = struct.Struct("i4xP")
"""An entry of CPython's table of signals: a flag for a noted signal, and the handler."""
_POINTER = struct.Struct("P")
_HANDLER = _ENTRY.size - _POINTER.size
"""Distance of the handler from the beginning of its entry."""
_HEAD = object.__basicsize__
"""Bytes of the head of an object. The first field of a built-in function, behind it, points to its definition."""


class Handler(enum.Enum):
    """The kind of a Python handler of a signal."""

    RAISES = enum.auto()
    """Python's own handler: it raises `KeyboardInterrupt`."""
    OWN = enum.auto()
    """The program's own handler."""


def waiting_handler(pid: int, signum: int) -> Handler | None:
    """
    Return the kind of the handler that *pid* must still call for *signum*, once its main thread
    returns to Python; None without one.
    """
    layout = _layout()
    if layout is None:
        return None

    try:
        begin = next(region.begin for region in _writable_regions(pid) if region.file == layout.file)
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, StopIteration):
        # Not this interpreter, another user's process, or a kernel that hides its memory.
        return None

    try:
        entry = os.pread(memory, _ENTRY.size, begin + layout.table + signum * _ENTRY.size)
        tripped, handler = _ENTRY.unpack(entry)
        if tripped != 1:
            return None
        code = os.pread(memory, _POINTER.size, handler + _HEAD)
        interrupt = _POINTER.pack(begin + layout.interrupt)
    except (OSError, struct.error, OverflowError):
        # The process ended, or has other data there.
        return None
    finally:
        os.close(memory)

    is_pythons = signum == signal.SIGINT and code == interrupt
    return Handler.RAISES if is_pythons else Handler.OWN


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

    interrupt = _POINTER.unpack(ctypes.string_at(id(_signal.default_int_handler) + _HEAD, _POINTER.size))[0]
    found = []
    for region in _writable_regions(os.getpid()):
        data = ctypes.string_at(region.start, region.end - region.start)
        for place in _tables_in(data, handlers):
            table = region.start + place
            found.append(_Layout(region.file, table - region.begin, interrupt - region.begin))

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


def _writable_regions(pid: int) -> Iterator[_Region]:
    """Yield the writable regions of the interpreter's files in the memory of *pid*."""
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
