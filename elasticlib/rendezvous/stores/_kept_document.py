"""
The coordinator's document in memory that a launcher keeps, for the sidecar that replaces the one
with the store.

Rules of this file: the writer may be killed at any moment. So a new document is written beside the
last one. It counts once the head contains its place.
"""

from __future__ import annotations

import contextlib
import os
import struct

from elasticlib import processes
from elasticlib.processes import read_exactly, write_exactly

_HEAD = struct.Struct("QQ")
"""
Offset and size of the valid document. It lies in one page, so it is written whole or not at all.
"""


class KeptDocument:
    """
    A document in the memory *descriptor*, which this object owns from now on; without one, an empty
    document.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = processes.anonymous_file("coordinator") if descriptor is None else descriptor

    def fileno(self) -> int:
        """Return the descriptor for another process to read and write the same document; -1 once closed."""
        return self._descriptor

    def load(self) -> bytes | None:
        """Return the last saved document; None if there is none."""
        offset, size = self._place()
        return read_exactly(self._descriptor, size, offset) if size else None

    def save(self, data: bytes) -> None:
        """Replace the document. If a limit of a file's size leaves no room, no document is kept."""
        offset, size = self._place()

        # The last document stays whole until the head names the new one: a killed writer leaves the last one valid.
        before = _HEAD.size + len(data) <= offset
        start = _HEAD.size if before else max(_HEAD.size, offset + size)
        try:
            write_exactly(self._descriptor, data, start)
            write_exactly(self._descriptor, _HEAD.pack(start, len(data)))
        except OSError:
            # With the older document a successor would repeat later decisions.
            self.purge()

    def purge(self) -> None:
        """Delete the document."""
        with contextlib.suppress(OSError):
            write_exactly(self._descriptor, _HEAD.pack(0, 0))

    def close(self) -> None:
        """Free the memory, if no other process has it; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _place(self) -> tuple[int, int]:
        head = os.pread(self._descriptor, _HEAD.size, 0)
        return _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
