"""
The last lines that a Python worker wrote to stderr, kept in memory that outlives it.

The stream itself goes where it always went, so that a terminal stays a terminal and the order of lines
stays what it was; what Python writes is noted beside it. Native code that writes to descriptor 2 by
itself is not noted: it can be read on the console, or in the file where stderr is redirected.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from elasticlib.workers.child import _report

MOST = 32768
"""Bytes that the note may have; half of it, the newer, stays when it is full."""


class NotedFile(io.FileIO):
    """Descriptor 2, with a copy of what is written to it in a memfd."""

    def __init__(self, note: int) -> None:
        super().__init__(2, "wb", closefd=False)
        self.name = "<stderr>"
        self._note = note
        self._identity = _report.identity(note)
        self._size = 0

    def write(self, data: Any, /) -> int:
        """Write *data* to stderr, then note it: an error of the stream is the writer's, one of the note nobody's."""
        count = super().write(data)
        # The user's code may have closed all descriptors, and opened a file of its own under this number.
        if _report.identity(self._note) == self._identity:
            self._keep(bytes(memoryview(data)[:count])[-MOST // 2 :])
        return count

    def _keep(self, data: bytes) -> None:
        if self._size + len(data) > MOST:
            data = (os.pread(self._note, MOST, 0) + data)[-MOST // 2 :]
            self._size = 0
            os.ftruncate(self._note, len(data))
        self._size += os.pwrite(self._note, data, self._size)


def install(note: int) -> None:
    """Have ``sys.stderr`` noted in the memfd *note*; it looks as it did before."""
    former = sys.stderr
    if former is None:
        return
    file = NotedFile(note)
    stream: Any = io.TextIOWrapper(
        file,  # and no buffer between, as with python -u
        encoding=former.encoding,
        errors=former.errors,
        line_buffering=file.isatty(),
        write_through=True,
    )
    stream.mode = "w"
    sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]


def last_lines(text: str, most: int = 10) -> tuple[str, ...]:
    """The last lines of *text*; of a line that was rewritten by carriage returns, its last state."""
    return tuple(
        line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip("\n").split("\n")[-most:] if line
    )
