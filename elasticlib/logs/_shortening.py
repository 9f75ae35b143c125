"""
Files of output that become too long: their oldest part is given back to the disk, and nothing moves.

Rules of this file: what is left stays at its place, so that whoever writes, copies or reads the file needs no word of
it; there is a hole before it. Where the file system makes none, the file stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

MOST = 64 << 20
"""Bytes of output of one worker from which on the oldest go."""
KEPT = 32 << 20
"""Bytes of it that stay."""
_STEP = 1 << 20
"""A hole ends at a multiple of it: of any file system's blocks."""
_PUNCH_AND_KEEP_SIZE = 0x02 | 0x01


@functools.cache
def _fallocate() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    found = getattr(libc, "fallocate64", None) or libc.fallocate
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def shorten_file(path: str) -> None:
    """Give back all but the last `KEPT` bytes, or a few more, of a file that takes more than `MOST` of its disk."""
    with contextlib.suppress(OSError, AttributeError):  # it is gone, or there is no such call
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
    """Go on behind a hole at the place where *descriptor* is to be read next; how many bytes that were."""
    here = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        there = os.lseek(descriptor, here, os.SEEK_DATA)
    except OSError:  # there is nothing behind it, or the file system does not know
        there = os.lseek(descriptor, here, os.SEEK_SET)
    return there - here


def note_of_removed_bytes(count: int) -> str:
    """What stands for *count* bytes that are gone."""
    return f"[... {count / 1e6:.0f} MB before this are gone: of a worker's output the newest is kept]"
