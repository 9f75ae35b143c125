"""
Copies of growing files to a text stream, line by line.

Rules of this file: it copies only whole lines, each after its header. It polls for a file that does not
exist yet. A stop ends every wait at once, and then the present content of the files is copied. (Launches
do not use it: their console has one writer, `elasticlib.logs._tee`, which the kernel wakes.)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

from attrs import define
from typing_extensions import Self

logger = logging.getLogger(__name__)

_BLOCK = 1 << 18


@define
class _Follower:
    """One file that is copied to a text stream."""

    _header: str
    _file: str
    _dst: TextIO
    _wanted: Callable[[str], bool] | None
    _position: int = 0
    _open: bytes = b""
    """Beginning of a line whose end is not written yet."""

    def copy(self, last: bool) -> None:
        """Copy the new lines; with *last* also a line without an end."""
        try:
            # Opened for each copy, because the file may appear at any time.
            file = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return

        try:
            if os.fstat(file).st_size < self._position:
                # The file was truncated: it is copied from its new start.
                self._position, self._open = 0, b""
            while data := os.pread(file, _BLOCK, self._position):
                self._position += len(data)
                *lines, self._open = (self._open + data).split(b"\n")
                self._write(lines)
        finally:
            os.close(file)

        if last and self._open:
            lines, self._open = [self._open], b""
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace") + "\n" for line in lines]
        found = [self._header + text for text in texts if self._wanted is None or self._wanted(text)]
        if found:
            self._dst.write("".join(found))
            self._dst.flush()


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """
    Copy the lines of *file* to *dst*, each after *header*, until *finished* is set and the file is read to its end.

    It polls for new lines, or for the file, every *interval_sec* seconds. *log_line_filter* gets each line
    with its newline and returns True to copy it. Without a filter all lines are copied (torch copies none).
    A last line without newline gets one.
    (torch: ``torch.distributed.elastic.multiprocessing.tail_log.tail_logfile``)
    """
    _copy_until(finished, interval_sec, _Follower(header, file, dst, log_line_filter).copy)


def _copy_until(finished: threading.Event, interval: float, copy: Callable[[bool], None]) -> None:
    while not finished.is_set():
        copy(False)
        finished.wait(interval)
    # Copy lines that were written before the stop.
    copy(True)


class TailLog:
    """
    A thread that copies *log_files*, {number: path}, to *dst*.

    A line begins with ``log_line_prefixes[number]``, by default ``[<name><number>]:``. Files may be missing
    at first, and `stop` does not wait for them. *log_line_filter* gets each line, without its header, and
    returns True to copy it.
    (torch: ``torch.distributed.elastic.multiprocessing.tail_log.TailLog``)
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] | None = None,
    ) -> None:
        headers = {number: f"[{name}{number}]:" for number in log_files} | dict(log_line_prefixes or {})
        self._name = name
        self._followers = {
            number: _Follower(headers[number], path, dst, log_line_filter) for number, path in log_files.items()
        }
        self._interval = interval_sec
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> Self:
        """Start the thread, and return this object."""
        if self._followers and self._thread is None:
            work = (self._finished, self._interval, self._copy)
            self._thread = threading.Thread(target=_copy_until, args=work, name=f"TailLog_{self._name}", daemon=True)
            self._thread.start()
        return self

    def _copy(self, last: bool) -> None:
        for number, follower in list(self._followers.items()):
            try:
                follower.copy(last)
            except Exception:
                # Such as a file that may not be read; the other files are still copied.
                logger.exception(
                    "the lines of %s%s are no longer copied to the console, because of this error", self._name, number
                )
                del self._followers[number]

    def stop(self) -> None:
        """Copy the present content of the files, and end the thread; may be called again."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        """Return True once `stop` has returned."""
        return self._stopped
