"""
Notices of the kernel that a file was written, for readers of growing files.

Rules of this file: Python has no binding of inotify, so this uses ctypes. If no watch is available,
callers poll.
"""

from __future__ import annotations

import ctypes
import os
import struct

from attrs import define

# The flags, and the fixed part of an event: watch, mask, cookie, length of a name (source:
# inotify(7)).
_IN_MODIFY = 0x2
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


@define
class Inotify:
    """
    Watches on files; `fd` is readable once one of the files was written.

    A watch ends with its first notice. A notice costs the *writer* nearly as much as a short write. So the
    writer pays for one notice per check of the reader, not for one per write.
    """

    _libc: ctypes.CDLL
    fd: int

    @classmethod
    def open(cls) -> Inotify | None:
        """Return a new set of watches; None if the system lacks them, or this user's limit is reached."""
        try:
            libc = ctypes.CDLL(None)
            fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return None
        return cls(libc, fd) if fd >= 0 else None

    def add(self, fd: int) -> int | None:
        """Watch for the next write to the file of descriptor *fd*. Return the watch; None if unavailable."""
        # By the descriptor: its path may already name another file.
        path = f"/proc/self/fd/{fd}".encode()
        watch = int(self._libc.inotify_add_watch(self.fd, path, ctypes.c_uint32(_IN_MODIFY | _IN_ONESHOT)))
        return watch if watch >= 0 else None

    def remove(self, watch: int) -> None:
        """End a watch that has given no notice."""
        self._libc.inotify_rm_watch(self.fd, watch)

    def written(self) -> set[int]:
        """Return the watches whose files were written since the last call; -1 if events were lost."""
        try:
            events = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return set()
        # Events of a file have only the fixed part; those of a folder would add a name.
        return {watch for watch, *_ in _EVENT.iter_unpack(events)}
