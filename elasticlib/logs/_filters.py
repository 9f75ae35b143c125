"""
The second file of the lines that hold certain words, all workers mixed.

Rules of this file: what comes in are blocks of whole lines, and whole lines go out, in one write where the system
takes it so; a word is looked for in the line, never in its prefix. A file that fails is written to no more, which
is logged once: console and log files go on. Its descriptor ends with its last holder.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence

from elasticlib.errors import LogDirError

logger = logging.getLogger(__name__)


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
    be opened. Whoever makes it is its first holder; use from any thread.
    """

    def __init__(self, path: str, words: Iterable[str]) -> None:
        self.broken: OSError | None = None
        """What the file failed with."""
        self._path = path
        self._words = [word.encode("utf-8", "surrogateescape") for word in words]
        self._lock = threading.Lock()
        self._holders = 1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LogDirError(f"{path} cannot take the duplicated lines: {error}; give another log_dir") from error

    def hold(self) -> LineFilter:
        """One more holder."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """One holder less; the last one closes the file."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                os.close(self._fd)

    def __enter__(self) -> LineFilter:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

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
