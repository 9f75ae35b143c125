"""Memory of a descriptor as bytes: unlike Python's mmap, the mapping keeps no descriptor open."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """Mapping of a whole file."""

    # At the end of the interpreter this module's own names may be gone first.
    _unmap = _libc.munmap

    def __init__(self, descriptor: int, flags: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self.address = _libc.mmap(None, self._size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            self.address = None
            raise OSError(code := ctypes.get_errno(), os.strerror(code), "mmap")

    def bytes(self) -> memoryview:
        """Return the bytes; the mapping lives while they are used."""
        array = (ctypes.c_char * self._size).from_address(self.address)
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

    def __del__(self) -> None:
        if self.address is not None:
            self._unmap(self.address, self._size)


def mapped_bytes(descriptor: int, *, private: bool = False) -> memoryview:
    """
    Return all of the memory behind *descriptor*. Raises OSError.

    *private*: changes are not visible to other processes.
    """
    return _Mapping(descriptor, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED).bytes()
