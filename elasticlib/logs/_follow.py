"""
Readers of the workers' output files: lines of growing files, whole text, last line, size limit.

Rules of this file: a follower sleeps until the kernel reports a write, or until another thread wakes it.
A file that becomes too long releases the disk space of its oldest part, which becomes a hole. The rest
keeps its offset, so that writers and readers of the file are not disturbed. If the file system does not
support holes, the file stays unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elasticlib.logs._inotify import Inotify
from elasticlib.notebook import without
from elasticlib.processes import wait_readable

_BLOCK = 1 << 16
_POLL = 0.05
"""Polling interval in seconds, if the kernel gives no notice of writes."""
# More than enough: a table shows 60 characters of the line.
_TAIL = 8192
"""Bytes at the end of a file that are searched for its last line."""
MOST = 64 << 20
"""Maximum bytes of output of one worker; beyond it, the oldest are removed."""
# Half of `MOST`, so that a long file is shortened after each further 32 MiB, not at each call.
KEPT = 32 << 20
"""Bytes that stay then."""
_STEP = 1 << 20
"""A hole ends at a multiple of this, which is a multiple of any file system's block size."""
# FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE, which Python's os lacks (source: linux/falloc.h).
_PUNCH_AND_KEEP_SIZE = 0x02 | 0x01


class Follower:
    """Reader of a growing list of *files*, until *done* returns True and all are read to their end."""

    def __init__(self, files: Callable[[], Sequence[str]], done: Callable[[], bool]) -> None:
        self._files = files
        self._done = done
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Wake the reader: another file exists, or the last one is complete."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        descriptor, self._wake = self._wake, -1
        if descriptor >= 0:
            os.close(descriptor)

    def lines(self) -> Iterator[str]:
        """Yield each line once it is whole, without its line end; at last a line without one."""
        notice = Inotify.open()
        try:
            index = 0
            while True:
                # Asked first: a file may be added, and the job end, between the two questions.
                is_last, files = self._done(), self._files()
                if index < len(files):
                    yield from self._lines_of(files[index], index, notice)
                    index += 1
                elif is_last:
                    return
                else:
                    self._await(notice, None)
        finally:
            if notice is not None:
                os.close(notice.fd)

    def _lines_of(self, path: str, index: int, notice: Inotify | None) -> Iterator[str]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The file was removed.
            return

        rest = b""
        try:
            for gone, data in self._blocks(descriptor, index, notice):
                if gone:
                    yield note_of_removed_bytes(gone)
                    # The block after a hole begins within a line, whose beginning is gone.
                    rest, data = b"", data.partition(b"\n")[2]
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    # The text that replaces a displayed object may have several lines.
                    yield from without(line.decode("utf-8", "replace")).split("\n")
        finally:
            os.close(descriptor)

        if rest:
            yield rest.decode("utf-8", "replace")

    def _blocks(self, descriptor: int, index: int, notice: Inotify | None) -> Iterator[tuple[int, bytes]]:
        """Yield (bytes removed before it, block) for the blocks of a file, until its end is final."""
        while True:
            # Checked before the read: everything written by then is in this block or a later one.
            is_last = self._done() or index + 1 < len(self._files())

            # The watch also comes before the read, so that no write between the two is missed.
            watch = None if notice is None else notice.add(descriptor)
            gone = skip_hole(descriptor)
            data = os.read(descriptor, _BLOCK)
            yield gone, data
            if data:
                continue
            if is_last:
                return
            self._await(notice, None if watch is not None else _POLL)

    def _await(self, notice: Inotify | None, timeout: float | None) -> None:
        wait_readable([self._wake, *([] if notice is None else [notice.fd])], timeout)
        # Empty if the kernel or the time has ended the wait.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if notice is not None:
            # A notice that stays unread would end each later wait at once.
            notice.written()


def text_of(path: str) -> str:
    """Return the present text of the file; bytes that are not UTF-8 become U+FFFD."""
    with open(path, "rb", buffering=0) as file:
        gone = skip_hole(file.fileno())
        data = file.read()
    note = ""
    # The first line after a hole is incomplete.
    if gone:
        note = f"{note_of_removed_bytes(gone)}\n"
        data = data.partition(b"\n")[2]
    return note + without(data.decode("utf-8", "replace"))


def last_line(paths: Sequence[str]) -> str:
    """
    Return the last line that is not blank, as a terminal shows it; empty if there is none.

    Of several files, the one that was written last counts.
    """
    found = sorted({path: _written_at(path) for path in paths if path}.items(), key=lambda each: -each[1])
    return next(filter(None, (_last_line(path) for path, _ in found)), "")


def _written_at(path: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _last_line(path: str) -> str:
    with contextlib.suppress(OSError):
        for line in reversed(end_of_text(path, _TAIL).splitlines()):
            if line.strip():
                return line.strip()
    return ""


def end_of_text(path: str, most: int) -> str:
    """Return the last *most* bytes of the file as text; bytes that are not UTF-8 become U+FFFD. Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return without(file.read().decode("utf-8", "replace"))


# Files that become too long.


@functools.cache
def _fallocate() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    # On 32-bit machines glibc's plain call takes offsets of 32 bits.
    found = getattr(libc, "fallocate64", None) or libc.fallocate
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def shorten_file(path: str) -> None:
    """Release all but about the last `KEPT` bytes of a file that takes more than `MOST` bytes of disk."""
    # The file may be gone, and the C library may lack this call.
    with contextlib.suppress(OSError, AttributeError):
        # The blocks on the disk, because holes leave the size of the file unchanged.
        if os.stat(path).st_blocks * 512 <= MOST:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            length = (os.fstat(descriptor).st_size - KEPT) // _STEP * _STEP
            if length > 0:
                _fallocate()(descriptor, _PUNCH_AND_KEEP_SIZE, 0, length)
        finally:
            os.close(descriptor)


def skip_hole(descriptor: int) -> int:
    """Move the offset of *descriptor* past a hole at this place, and return the hole's size in bytes."""
    here = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        there = os.lseek(descriptor, here, os.SEEK_DATA)
    # No data follows, or the file system does not support holes.
    except OSError:
        there = os.lseek(descriptor, here, os.SEEK_SET)
    return there - here


def note_of_removed_bytes(count: int) -> str:
    """Return the line that replaces *count* removed bytes."""
    return f"[... {count / 1e6:.0f} MB of older output were dropped: only the newest output of a worker is kept]"
