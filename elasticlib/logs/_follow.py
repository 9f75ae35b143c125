"""
Lines of files that grow, for whoever iterates over them: one file after the other, until there will be no more.

Rules of this file: the reader sleeps until the kernel says that a file was written, or somebody wakes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from elasticlib._marks import without
from elasticlib.logs._inotify import Inotify
from elasticlib.logs._shortening import note_of_removed_bytes, skip_hole
from elasticlib.processes import wait_readable

_BLOCK = 1 << 16
_POLL = 0.05
"""Seconds between two looks where the kernel gives no notice."""


class Follower:
    """Reads the *files*, which may become more, until they are *done* and read to their end."""

    def __init__(self, files: Callable[[], Sequence[str]], done: Callable[[], bool]) -> None:
        self._files = files
        self._done = done
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Have it look again: there is another file, or there will be none."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        descriptor, self._wake = self._wake, -1
        if descriptor >= 0:
            os.close(descriptor)

    def lines(self) -> Iterator[str]:
        """Each line as soon as it is whole, without its end; at last what is left without one."""
        notice = Inotify.open()
        try:
            index = 0
            while True:
                files, is_last = self._files(), self._done()
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
        rest = b""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # it was taken away
        try:
            while True:
                is_last = self._done() or index + 1 < len(self._files())  # before the read: nothing comes after it
                watch = None if notice is None else notice.add(descriptor)
                if gone := skip_hole(descriptor):
                    yield note_of_removed_bytes(gone)
                data = os.read(descriptor, _BLOCK)
                if gone:  # what is behind it begins within a line
                    rest, data = b"", data.partition(b"\n")[2]
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    yield from without(line.decode("utf-8", "replace")).split("\n")
                if not data and is_last:
                    break
                if not data:
                    self._await(notice, None if watch is not None else _POLL)
        finally:
            os.close(descriptor)
        if rest:
            yield rest.decode("utf-8", "replace")

    def _await(self, notice: Inotify | None, timeout: float | None) -> None:
        wait_readable([self._wake, *([] if notice is None else [notice.fd])], timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if notice is not None:
            notice.written()
