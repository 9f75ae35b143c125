"""
The client's display of output of workers on other machines.

Rules of this file: a program's own streams get all of it. A notebook's cell gets the first and the last lines, and the
whole is in a file. A stream that was closed, or a full disk, does not affect the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import IO

from elasticlib._clock import monotonic
from elasticlib.logs import keep_marked_folder, make_marked_folder
from elasticlib.notebook import CallersStream, is_stdout_replaced
from elasticlib.remote._output_queue import OutputQueue

STDOUT, STDERR = b"\x01", b"\x02"
"""First byte of a piece of output, which names its stream."""


class ShownOutput:
    """The streams of the thread that makes this object, for the output of one call."""

    def __init__(self) -> None:
        self._caller = CallersStream() if is_stdout_replaced() else None
        self._whole = _WholeOutput()
        self._queue = OutputQueue(self._write, 0.0 if self._caller is None else self._caller.gather)
        self._keeps_whole = self._caller is not None and bool(self._caller.word)
        if self._caller is not None:
            self._caller.files = self._whole.place

    @property
    def is_full(self) -> bool:
        """True if a cell has not shown all output."""
        return self._caller is not None and self._caller.is_full

    def name_file(self, path: str) -> None:
        """Note that the file at *path* has the whole output, so that no other one is needed."""
        self._keeps_whole = False
        if self._caller is not None:
            self._caller.files = lambda: path

    @property
    def is_behind(self) -> bool:
        """True if much output waits for the stream."""
        return self._queue.is_long

    def watch(self, title: str, ranks: Sequence[int] | None, *, is_started: bool) -> None:
        """Report in the cell a long silence of *ranks* (None: all) of the job *title*, from `expect` on."""
        if self._caller is not None:
            self._caller.watch(title, ranks, is_pool=False, is_started=is_started)

    def begin(self) -> None:
        """Begin to show output. Raises `StartError` without a thread for it."""
        self._queue.begin()

    def expect(self) -> None:
        """Expect output from now on."""
        if self._caller is not None:
            self._caller.begin(lambda _: True, lambda: None)

    def look(self) -> float:
        """Report a silence that is due, and return the time of the next look."""
        seconds = None if self._caller is None else self._caller.look()
        return math.inf if seconds is None else monotonic() + seconds

    def show(self, data: bytes, taken: Callable[[], None] | None = None) -> None:
        """Show *data*, a byte for the stream and text; *taken* is as in `OutputQueue.add`."""
        # The caller's stream takes all output, and its pieces may be joined.
        self._queue.add(data if self._caller is None else data[1:], taken)

    def hurry(self) -> None:
        """Let nothing wait for the stream any more: the call ends."""
        self._queue.hurry()

    def end(self, is_impatient: Callable[[], object]) -> None:
        """
        Show the last lines, and wait for the stream until *is_impatient* returns True.

        A file stays only if the cell has not shown everything.
        """
        if self._queue.end(is_impatient) and self._caller is not None:
            self._caller.rest()
        self._whole.end(is_kept=self.is_full)

    def _write(self, data: bytes) -> None:
        if self._caller is not None:
            if self._keeps_whole:
                self._whole.add(data)
            self._caller(data)
            return

        stream = sys.stderr if data[:1] == STDERR else sys.stdout
        with contextlib.suppress(OSError, ValueError):
            stream.write(data[1:].decode(errors="replace"))
            stream.flush()


class _WholeOutput:
    """A file with all output, which is made for the first piece; old ones are removed like log folders."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._why_not = ""
        """Reason why it is not written."""

    def add(self, text: bytes) -> None:
        if self._why_not:
            return
        try:
            if self._file is None:
                self._file = open(os.path.join(make_marked_folder(), "output.log"), "wb", 0)
            self._file.write(text)
        except OSError as error:
            self._why_not = error.strerror or str(error)

    def place(self) -> str:
        """Return the path of the file, or the reason why there is none."""
        if self._why_not or self._file is None:
            return f"no file ({self._why_not or 'nothing was written'})"
        return self._file.name

    def end(self, *, is_kept: bool) -> None:
        """Close the file, and remove it unless it *is_kept*."""
        file, self._file = self._file, None
        # A stream that takes nothing may hold the writer's thread beyond the end.
        self._why_not = self._why_not or "the call has ended"
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.close()
        folder = os.path.dirname(file.name)
        if is_kept:
            keep_marked_folder(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
