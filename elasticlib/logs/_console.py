"""
Destinations of blocks of whole lines: the console, and a file for lines with certain words.

Rules of this file: a block is written completely, even if the stream takes only parts. A full stream is
waited for, and a closed one raises. Words are searched in the line, never in its prefix. A file that
fails gets no more lines, which is logged once; console and log files continue. The file is closed with
the last reference to its object.
"""

from __future__ import annotations

import logging
import os
import re
import select
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TextIO, TypeAlias

from elasticlib.errors import LogDirError
from elasticlib.logs._bar_text import BarText
from elasticlib.processes import closed_in_forks

logger = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[bytes], None]
"""Write one block of whole lines; return when it is written, raise when its reader is gone."""


class Console(Protocol):
    """A `Sink` for a single job, which also learns of the job's start and of silence."""

    gather: float
    """Seconds between two expensive blocks, unless a caller waits for the second."""
    bar: BarText | None
    """Text for a line that is being rewritten; None: lines only."""

    def begin(self, catch_up: Callable[[float], bool], wake: Callable[[], None]) -> None:
        """
        Prepare for the start of workers.

        *catch_up* waits, up to some seconds, until all their output was written to this sink. *wake* makes
        the tee call `look` soon.
        """

    def look(self) -> float | None:
        """
        React to a moment without output.

        Return the seconds until the next call if no output arrives; None for no further call.
        """

    def __call__(self, block: bytes, /) -> None:
        """Write one block of whole lines, as any sink."""


def console_sink(stream: TextIO | None) -> Sink:
    """
    Return a sink that writes to *stream*, such as ``sys.stdout``, and flushes after each block.

    Bytes go unchanged to ``stream.buffer`` if it exists, else as UTF-8 text to ``stream.write``
    (notebooks), with U+FFFD for invalid bytes. A full non-blocking descriptor is waited for. With None,
    Python's value for a stream that was closed at start, the sink drops everything.
    """
    if stream is None:
        return lambda block: None
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        return lambda block: _write_text(stream, block)
    return lambda block: _write_bytes(buffer, block)


def _write_text(stream: TextIO, block: bytes) -> None:
    stream.write(block.decode("utf-8", "replace"))
    stream.flush()


def _write_bytes(buffer: Any, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        try:
            # A full raw stream (python -u) returns None.
            taken = buffer.write(rest) or 0
        except BlockingIOError as full:
            # A buffered stream raises if it is full, and says how much it has taken.
            taken = full.characters_written
        rest = rest[taken:]
        if rest:
            _wait_until_writable(buffer)

    # The stream may be full here too; it keeps the rest, so the flush is repeated.
    while True:
        try:
            return buffer.flush()  # type: ignore[no-any-return]
        except BlockingIOError:
            _wait_until_writable(buffer)


def _wait_until_writable(buffer: Any) -> None:
    poll = select.poll()
    poll.register(buffer.fileno(), select.POLLOUT)
    poll.poll()


def matching(block: bytes, prefix: bytes, words: Sequence[bytes]) -> bytes:
    """
    Return the lines of *block* that contain one of *words*, unchanged and with their prefix.

    Each line of *block* is *prefix*, text without newline, newline; the newline may be part of a word.
    """
    # Most blocks have no such line, and this search costs less than the split.
    if not any(word in block for word in words):
        return b""
    # Split at the prefix and not at newlines, since a prefix may contain one.
    lines: list[bytes] = re.findall(re.escape(prefix) + rb"[^\n]*\n", block)
    return b"".join([line for line in lines if any(line.find(word, len(prefix)) >= 0 for word in words)])


class LineFilter:
    """
    Writer of the lines that contain one of *words* to the file at *path*.

    Lines are appended if the file exists. Raises `LogDirError` if it cannot be opened.
    """

    def __init__(self, path: str, words: Iterable[str]) -> None:
        self.broken: OSError | None = None
        """Error of the file; None while it works."""
        self._path = path

        # Set first, because `__del__` runs even if the file cannot be opened.
        self._fd = -1
        self._words = [word.encode("utf-8", "surrogateescape") for word in words]
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LogDirError(
                f"the file for the filtered lines, {path}, cannot be opened: {error}; give another log_dir"
            ) from error

        closed_in_forks(self)

    def close(self) -> None:
        """Close the file; also done when the last reference to this object is gone."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close

    def copy(self, block: bytes, prefix: bytes) -> None:
        """Write the lines of *block* that contain one of the words; each line begins with *prefix*."""
        if self.broken is not None:
            return
        rest = memoryview(matching(block, prefix, self._words))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.broken = error
            logger.warning(
                "%s cannot be written (%s) and gets no more lines; console and log files continue", self._path, error
            )
