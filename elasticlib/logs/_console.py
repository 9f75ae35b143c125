"""
Where blocks of whole lines go: to whatever stands for the console, and to the second file of lines with certain words.

Rules of this file: a block is written whole, however often the stream takes only a part; a stream that is full is
waited for, one that is gone raises. A word is looked for in the line, never in its prefix. A file that fails is
written to no more, which is logged once: console and log files go on. Its descriptor ends with the last who knows it.
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
"""Takes one block of whole lines; returns when it is written, raises when its reader is gone."""


class Console(Protocol):
    """A `Sink` that is one job's alone, and may want to be told what is still to come."""

    gather: float
    """Seconds between two blocks where nobody waits for the second, as it costs much."""
    bar: BarText | None
    """What it wants in place of a line that is being rewritten; None: lines only."""

    def begin(self, catch_up: Callable[[float], bool], wake: Callable[[], None]) -> None:
        """
        Workers are about to start.

        *catch_up* waits, for some seconds at most, until all they wrote was fed; *wake* has `look` be called soon.
        """

    def look(self) -> float | None:
        """Nothing is there to be fed; return the seconds after which to look again if nothing comes, None: never."""

    def __call__(self, block: bytes, /) -> None:
        """As any sink."""


def console_sink(stream: TextIO | None) -> Sink:
    """
    A sink that writes to *stream*, such as ``sys.stdout``, and flushes after each block.

    Bytes go unchanged to ``stream.buffer`` where there is one, else as UTF-8 text to ``stream.write`` (notebooks),
    with U+FFFD for what is not UTF-8. A full non-blocking descriptor is waited for. None, which is what Python
    makes of a descriptor that is closed at start, drops everything.
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
            # None: a raw stream (python -u) that is full says so in this way.
            taken = buffer.write(rest) or 0
        except BlockingIOError as full:
            taken = full.characters_written
        rest = rest[taken:]
        if rest:
            _wait_until_writable(buffer)
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
    The lines of *block* that hold one of *words*, as they are.

    Each line of *block* is *prefix*, text without newline, newline; the newline may be part of a word.
    """
    if not any(word in block for word in words):
        return b""
    # By prefix and not by newline, which a prefix may hold.
    lines: list[bytes] = re.findall(re.escape(prefix) + rb"[^\n]*\n", block)
    return b"".join([line for line in lines if any(line.find(word, len(prefix)) >= 0 for word in words)])


class LineFilter:
    """
    Writes those lines to the file at *path* that hold one of *words*.

    The file is made when it is not there, and its end is written to when it is. Raises `LogDirError` where it cannot
    be opened.
    """

    def __init__(self, path: str, words: Iterable[str]) -> None:
        self.broken: OSError | None = None
        """What the file failed with."""
        self._path = path
        self._fd = -1
        self._words = [word.encode("utf-8", "surrogateescape") for word in words]
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LogDirError(f"{path} cannot take the duplicated lines: {error}; give another log_dir") from error
        closed_in_forks(self)

    def close(self) -> None:
        """Let go of the file, as happens of itself once nobody knows this object."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close

    def copy(self, block: bytes, prefix: bytes) -> None:
        """Write the lines of *block*, each of which begins with *prefix*, that hold one of the words."""
        if self.broken is not None:
            return
        rest = memoryview(matching(block, prefix, self._words))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.broken = error
            logger.warning("%s takes no more lines (%s); console and log files go on", self._path, error)
