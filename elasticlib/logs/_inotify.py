"""
The kernel's word that a file was written, for whoever follows files.

Rules of this file: there is no binding in Python's library, hence ctypes. Where no watch is to be had, callers poll.
"""

from __future__ import annotations

import ctypes
import os
import struct

from attrs import define

_IN_MODIFY = 0x2
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


@define
class Inotify:
    """
    Watches on files, by way of ctypes because Python has no binding; `fd` is readable when one of them was written.

    A watch ends with its first notice: a notice per write costs the *writer* nearly as much as a short write itself,
    so it pays for one per look of ours, not for each.
    """

    _libc: ctypes.CDLL
    fd: int

    @classmethod
    def open(cls) -> Inotify | None:
        """A new set of watches; None where the system has none, or none left for this user."""
        try:
            libc = ctypes.CDLL(None)
            fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return None
        return cls(libc, fd) if fd >= 0 else None

    def add(self, fd: int) -> int | None:
        """Watch for the next write to the file behind descriptor *fd*; returns the watch, None if it cannot be had."""
        # Through the descriptor: its path may already name another file.
        path = f"/proc/self/fd/{fd}".encode()
        watch = int(self._libc.inotify_add_watch(self.fd, path, ctypes.c_uint32(_IN_MODIFY | _IN_ONESHOT)))
        return watch if watch >= 0 else None

    def remove(self, watch: int) -> None:
        """End a watch that has given no notice."""
        self._libc.inotify_rm_watch(self.fd, watch)

    def written(self) -> set[int]:
        """The watches whose files were written since the last call; -1 stands for "events were lost, look at all"."""
        try:
            events = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return set()
        # A watch on a file, unlike one on a folder, has no name after the fixed part of its events.
        return {watch for watch, *_ in _EVENT.iter_unpack(events)}
