"""
Files of elasticlib under the user's limit of a file's size (``RLIMIT_FSIZE``), which applies to
anonymous files too.

A file that processes share is internal, so it may exceed the soft limit. With the privilege it
may exceed the hard limit too; without it, the content is split over several files.

Rules of this file: a block restores the limit at its end, and changes nothing if the limit leaves
room.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from elasticlib.processes._descriptors import close_each
from elasticlib.processes._memory_files import anonymous_file

_FSIZE = resource.RLIMIT_FSIZE
_PART = "+"
"""Added to a name once for each earlier part of the same content."""
_lock = threading.RLock()
"""Held while the limit is raised; a signal handler of the same thread may write meanwhile."""


class MemoryInFile(Protocol):
    """Memory that is backed by a file."""

    def fileno(self) -> int:
        """Return the descriptor."""


def _renew_lock() -> None:
    """Replace the lock in a forked process: another thread may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def room_for_file(size: float) -> Iterator[float]:
    """
    Allow files of *size* bytes within the block, if this process can.

    Yields the number of bytes that a file may have.
    """
    soft, hard = resource.getrlimit(_FSIZE)
    if _bytes(soft) >= size:
        yield _bytes(soft)
        return

    with _lock:
        # Read again: another thread may have raised or restored the limit meanwhile.
        soft, hard = resource.getrlimit(_FSIZE)
        try:
            yield _raise_limit(hard, size)
        finally:
            resource.setrlimit(_FSIZE, (soft, hard))


def _raise_limit(hard: int, size: float) -> float:
    if _bytes(hard) < size:
        with contextlib.suppress(ValueError, OSError):
            # Without the privilege the hard limit stays.
            resource.setrlimit(_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return math.inf
    resource.setrlimit(_FSIZE, (hard, hard))
    return _bytes(hard)


def _bytes(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def write_exactly(descriptor: int, data: bytes | memoryview, offset: int = 0) -> None:
    """
    Write all of *data* into a file from *offset*.

    Raises OSError (EFBIG) if the limit leaves no room for it.
    """
    view = memoryview(data).cast("B")
    with room_for_file(offset + len(view)) as most:
        # A write beyond the limit raises SIGXFSZ, which ends a process that does not ignore it.
        if most < offset + len(view):
            raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: raise the file size limit (ulimit -f)")
        while view:
            # Linux writes less than 2 GiB in one call.
            count = os.pwrite(descriptor, view[: 1 << 30], offset)
            view, offset = view[count:], offset + count


def files_with_content(content: bytes, name: str) -> list[int]:
    """
    Return anonymous files that hold *content*: one, or as many parts as the limit requires. The
    caller closes them.

    Raises OSError if no descriptor is left, or no byte may be written.
    """
    with room_for_file(len(content)) as most:
        step = max(1, int(min(len(content), most)))
    view, descriptors = memoryview(content), list[int]()
    try:
        # Even empty content has one file.
        for begin in range(0, max(1, len(content)), step):
            # One step of the interpreter: an interrupt cannot lose the descriptor.
            descriptors.extend(map(anonymous_file, (name,)))
            write_exactly(descriptors[-1], view[begin : begin + step])
    except BaseException:
        close_each(descriptors)
        raise

    return descriptors


def read_exactly(descriptor: int, size: int, offset: int = 0) -> bytes:
    """Return *size* bytes of a file from *offset*. Raises EOFError if it has fewer."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file of descriptor {descriptor} is {len(view)} bytes shorter than expected")
        view, offset = view[count:], offset + count
    return bytes(data)


def content_of_files(descriptors: Sequence[int]) -> bytes:
    """Return the content that `files_with_content` has put into these files."""
    parts = [read_exactly(each, os.fstat(each).st_size) for each in descriptors]
    return parts[0] if len(parts) == 1 else b"".join(parts)


# Several contents, by name.


def descriptors_of_memories(memories: Mapping[str, bytes | MemoryInFile]) -> dict[str, int]:
    """
    Return descriptors of *memories*, for a message; the caller closes them.

    `content_of_memory` returns the content.
    """
    found: dict[str, int] = {}
    try:
        for name, content in memories.items():
            if isinstance(content, bytes):
                found.update(
                    (f"{name}{_PART * number}", each) for number, each in enumerate(files_with_content(content, name))
                )
            else:
                # One step of the interpreter: an interrupt cannot lose the descriptor.
                found.update(zip((name,), map(os.dup, (content.fileno(),)), strict=True))
    except BaseException:
        close_each(found.values())
        raise

    return found


def content_of_memory(name: str, memories: Mapping[str, int]) -> bytes:
    """
    Return the content that `descriptors_of_memories` stored under *name*, in one part or several.
    """
    return content_of_files([memories[each] for each in names_of_parts(name, memories)])


def names_of_parts(name: str, memories: Mapping[str, int]) -> list[str]:
    """Return the names of the files that hold the parts of *name*."""
    return [each for each in memories if each.rstrip(_PART) == name]
