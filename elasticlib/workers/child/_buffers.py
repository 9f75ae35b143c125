"""
Large arguments: memory that the launcher fills once, and that each worker maps with private,
writable pages.

Rules of this file: it holds the caller's values at that moment, and no process can change it. A
mapping lives as long as the objects in it. Tensors that their program shares are shared.
"""

from __future__ import annotations

import importlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from json import dumps, loads
from typing import Any

from elasticlib import processes
from elasticlib.processes import mapped_bytes, room_for_file, write_exactly

_PAGE = mmap.PAGESIZE
_LENGTH = struct.Struct("!Q")
shared: Sequence[int] = ()
"""Descriptors of the storages that the launcher shares, while a function is unpacked."""


class Memory:
    """
    Memory behind the descriptor that *opened* returns for *args*; this object owns the
    descriptor.
    """

    _fds: Sequence[int] = ()

    def __init__(self, opened: Callable[..., int], *args: Any) -> None:
        self._fds = made = list[int]()
        # One step of the interpreter: an interrupt cannot lose the descriptor between opening and
        # storing it.
        made.extend(map(opened, *((each,) for each in args)))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fds[0]

    def __del__(self) -> None:
        for descriptor in self._fds:
            os.close(descriptor)


def can_be_apart(parts: Sequence[int]) -> bool:
    """Return True if the limit of a file's size has room for parts of these sizes."""
    whole = end_of(places(parts)) + len(trailer(places(parts)))
    with room_for_file(whole) as most:
        return whole <= most


def sealed(parts: Sequence[memoryview]) -> Memory:
    """Return a copy of *parts*, which `mapped` reads. Raises OSError if no memory is left."""
    found = Memory(processes.sealable_file, "buffers")
    descriptor = found.fileno()
    parts_at = places([part.nbytes for part in parts])
    for part, (offset, _) in zip(parts, parts_at, strict=True):
        write_exactly(descriptor, part, offset)
    write_exactly(descriptor, trailer(parts_at), end_of(parts_at))
    processes.seal(descriptor)
    return found


def places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return offset and size of parts of *sizes*, each at the beginning of a page."""
    found, offset = [], 0
    for size in sizes:
        found.append((offset, size))
        offset += -(-size // _PAGE) * _PAGE
    return found


def end_of(parts: Sequence[tuple[int, int]]) -> int:
    """Return the offset behind the parts."""
    return parts[-1][0] + -(-parts[-1][1] // _PAGE) * _PAGE if parts else 0


def trailer(parts: Sequence[tuple[int, int]]) -> bytes:
    """Return the index that stands behind the parts."""
    text = dumps(parts).encode()
    return text + _LENGTH.pack(len(text))


def mapped(descriptor: int) -> list[memoryview]:
    """Return the parts of the memory, private to this process: written pages are its own."""
    size = os.fstat(descriptor).st_size
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, size - _LENGTH.size))
    parts = loads(os.pread(descriptor, length, size - _LENGTH.size - length))
    whole = mapped_bytes(descriptor, private=True)
    return [whole[offset : offset + count] for offset, count in parts]


# Functions that pickles of tensors call.


def storage_of(data: Any) -> Any:
    """Return a storage of torch's over *data*."""
    torch: Any = importlib.import_module("torch")
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else torch.UntypedStorage(0)


def shared_storage(index: int, size: int) -> Any:
    """Return the storage that the launcher's program shares as the *index*-th."""
    torch: Any = importlib.import_module("torch")
    return torch.UntypedStorage._new_shared_fd_cpu(shared[index], size)


def named_storage(index: int, size: int) -> Any:
    """
    Return a storage like `shared_storage`, which other processes find by its name.

    In its file, torch's own notes come before it.
    """
    whole = mapped_bytes(shared[index])
    return storage_of(whole[len(whole) - size :])


def typed(storage: Any, dtype: Any) -> Any:
    """Return *storage* with the type *dtype*, as torch's tensors need it."""
    return importlib.import_module("torch").storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
