"""
Files that grow, copied line by line to a text stream.

Rules of this file: whole lines only, each after its header; a file that is not there yet is looked for again and
again, but a stop ends every wait at once, after what is in the files by then. (Launches do not use it: their
console has one writer, `elasticlib.logs._tee`, which the kernel wakes.)
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
    """One file on its way to a text stream."""

    _header: str
    _file: str
    _dst: TextIO
    _wanted: Callable[[str], bool] | None
    _position: int = 0
    _open: bytes = b""
    """The beginning of a line whose end is not written yet."""

    def copy(self, last: bool) -> None:
        """Copy the lines that are there; with *last* also one that has no end."""
        try:
            file = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if os.fstat(file).st_size < self._position:
                # The file was cut to nothing: it is followed from its new start.
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

    It looks for new lines, or for the file, every *interval_sec* seconds. *log_line_filter* gets each line with its
    newline and says whether it is copied; without one all are (torch copies none). A last line without end gets one.
    (torch: ``torch.distributed.elastic.multiprocessing.tail_log.tail_logfile``)
    """
    _copy_until(finished, interval_sec, _Follower(header, file, dst, log_line_filter).copy)


def _copy_until(finished: threading.Event, interval: float, copy: Callable[[bool], None]) -> None:
    while not finished.is_set():
        copy(False)
        finished.wait(interval)
    # The lines that were written before the stop.
    copy(True)


class TailLog:
    """
    Copies *log_files*, {number: path}, to *dst* while it runs, from one thread.

    A line begins with ``log_line_prefixes[number]``, by default ``[<name><number>]:``. Files need not be there yet, and
    `stop` waits for none. *log_line_filter* gets each line, without its header, and says whether it is copied. (torch:
    ``torch.distributed.elastic.multiprocessing.tail_log.TailLog``)
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
        """Begin; returns this object."""
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
                logger.exception("the copying of log file %s%s ended early", self._name, number)
                del self._followers[number]

    def stop(self) -> None:
        """Copy what is in the files by now, and end; may be called again."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has returned."""
        return self._stopped
