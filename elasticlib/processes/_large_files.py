"""
Files of ours under the user's limit of a file's size (``RLIMIT_FSIZE``), which holds for anonymous ones, too.

What processes share is no file to the user: it may be larger than the soft limit, and larger than the hard one where
this process has the privilege. Where it has none, content is in several files. Rules of this file: the limit is as it
was once a block ends; nothing is touched where it leaves room.
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
"""Follows a name once for each file before that has a part of the same content."""
_lock = threading.RLock()
"""Held while the limit is raised; a signal handler may come in between, and write."""


class MemoryInFile(Protocol):
    """Memory that is in a file already."""

    def fileno(self) -> int:
        """The descriptor."""


def _renew_lock() -> None:
    """In a forked process: another thread may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def room_for_file(size: float) -> Iterator[float]:
    """Within it this process may write files of *size* bytes if that can be had; it gives how many they may have."""
    soft, hard = resource.getrlimit(_FSIZE)
    if _bytes(soft) >= size:
        yield _bytes(soft)
        return
    with _lock:
        # Read again: another thread may have raised the limit, or put it back, in the meantime.
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
    """All of *data* into a file from *offset*. Raises OSError (EFBIG) where the limit leaves no room for it."""
    view = memoryview(data).cast("B")
    with room_for_file(offset + len(view)) as most:
        if most < offset + len(view):
            raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: raise the limit of a file's size (ulimit -f)")
        while view:
            count = os.pwrite(descriptor, view[: 1 << 30], offset)
            view, offset = view[count:], offset + count


def files_with_content(content: bytes, name: str) -> list[int]:
    """
    Anonymous files that have *content*: one, or as many as the limit makes of it. The caller closes them.

    Raises OSError: no descriptor is left, or no byte may be written.
    """
    with room_for_file(len(content)) as most:
        step = max(1, int(min(len(content), most)))
    view, descriptors = memoryview(content), list[int]()
    try:
        for begin in range(0, max(1, len(content)), step):
            # One step of the interpreter: an interrupt cannot lose the descriptor.
            descriptors.extend(map(anonymous_file, (name,)))
            write_exactly(descriptors[-1], view[begin : begin + step])
    except BaseException:
        close_each(descriptors)
        raise
    return descriptors


def read_exactly(descriptor: int, size: int, offset: int = 0) -> bytes:
    """*size* bytes of a file from *offset*."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"descriptor {descriptor} holds {len(view)} bytes less than it should")
        view, offset = view[count:], offset + count
    return bytes(data)


def content_of_files(descriptors: Sequence[int]) -> bytes:
    """What `files_with_content` has put into these."""
    parts = [read_exactly(each, os.fstat(each).st_size) for each in descriptors]
    return parts[0] if len(parts) == 1 else b"".join(parts)


# Several of them, by name.


def descriptors_of_memories(memories: Mapping[str, bytes | MemoryInFile]) -> dict[str, int]:
    """Descriptors of *memories*, for a message; the caller closes them. `content_of_memory` finds the content again."""
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
    """What `descriptors_of_memories` got under that *name*: a limit of a file's size may have made parts of it."""
    return content_of_files([memories[each] for each in names_of_parts(name, memories)])


def names_of_parts(name: str, memories: Mapping[str, int]) -> list[str]:
    """The names of the files that have what is called *name*."""
    return [each for each in memories if each.rstrip(_PART) == name]
