"""
The console's copy of the workers' output: one thread that follows their log files.

Rules of this file: workers write to files and never wait for us; the console has one writer and gets whole
lines only; a stream may hold the thread for one block per turn, no longer; what is kept in memory is one open
line and one block per stream, since the files keep the rest. The thread sleeps until the kernel says that a
file was written, or, where lines gather, until it is time to look at those that were. A sink that fails is
written to no more, which is logged once and kept in `Tee.broken`. A fault of our own ends the thread and what it
followed, is logged once, and the next file begins with a new thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable

from attrs import define, field

from elasticlib._clock import monotonic
from elasticlib.logs._bars import BarAssembler, BarText
from elasticlib.logs._console import LineFilter, Sink
from elasticlib.logs._inotify import Inotify
from elasticlib.logs._lines import LineAssembler, Verbatim
from elasticlib.processes import start_thread
from elasticlib.spec import Std

logger = logging.getLogger(__name__)

BLOCK = 256 * 1024
"""Bytes of one stream per turn."""
_FIRST_BLOCK = 64 * 1024  # below the size from which malloc maps and unmaps memory for each read
_LEAST_PAUSE, _LONGEST_PAUSE = 0.005, 0.05
GATHER_SECONDS = 0.001
"""Seconds that writers in full flow are left alone, so that a little gathers rather than each line wakes us."""
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


@define(eq=False)
class _Stream:
    fd: int
    std: Std
    prefix: bytes
    lines: LineAssembler | BarAssembler | Verbatim
    copy: LineFilter | None
    done: threading.Event = field(factory=threading.Event)
    watch: int | None = None
    polled: bool = False
    """No watch could be had."""
    flows: bool = False
    """It is looked at again when lines have gathered, without a notice."""
    position: int = 0
    block: int = _FIRST_BLOCK
    end: int | None = None
    """Size of the file when its writers were dead; None while they may live."""
    shown: int = 0
    """As `position`, of what the sink has got; -1 while that misses the line that has no end yet."""
    unreadable: bool = False


@define(eq=False)
class _CatchUp:
    sizes: dict[_Stream, int]
    done: threading.Event = field(factory=threading.Event)


class Tee:
    """
    Copies what workers write to their log files to *out* and *err*, line by line.

    `follow`, `drain_and_forget` and `finish` may be called from any thread. The thread starts with the first
    file. *notify* False polls every 5 to 50 ms instead of asking for the kernel's notice, which is also what
    happens where no notice is to be had. *gather* is for sinks to which a block is dear: what is written within so
    many seconds of the last lines waits until they are over, or until somebody waits for it. *look* is called before
    the thread waits for more; it returns the seconds after which to call it again if nothing comes, None for never.
    """

    def __init__(
        self,
        out: Sink,
        err: Sink,
        *,
        notify: bool = True,
        gather: float = GATHER_SECONDS,
        look: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.broken: dict[Std, Exception] = {}
        """The sinks that failed, with what they raised."""
        self._sinks = {Std.OUT: out, Std.ERR: err}
        self._notify = notify
        self._gather = gather
        self._look = look
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finished = False
        self._followed: dict[str, _Stream] = {}
        # From here on: the thread's own, except for the queue and what wakes the thread.
        self._queue: deque[_Stream] = deque()
        self._awaited: deque[_CatchUp] = deque()
        self._wake = -1
        self._inotify: Inotify | None = None
        self._streams: set[_Stream] = set()
        self._watched: dict[int, _Stream] = {}
        self._ready: set[_Stream] = set()
        self._pause = _LEAST_PAUSE
        self._last_found = -math.inf
        self._is_behind = False
        """Whether a stream had more than a block."""

    def follow(
        self,
        path: str,
        prefix: bytes,
        std: Std,
        *,
        copy: LineFilter | None = None,
        verbatim: bool = False,
        bar: BarText | None = None,
    ) -> None:
        """
        Copy the file at *path*, from its first byte on, to the sink of *std*, each line after *prefix*.

        *verbatim*: without a prefix, byte by byte, as if it wrote there itself. *bar* says what the sink gets of a line
        that is being rewritten; None: its state as a line of its own, once a second.

        The file must be there (OSError) and not be followed yet (ValueError). A file that is cut to nothing
        meanwhile is followed on from its new start. *copy* gets the same lines, also when the sink has failed.
        """
        with self._lock:
            if self._finished:
                raise RuntimeError("this tee was finished: make another")
            if path in self._followed:
                raise ValueError(f"{path} is followed already")
            if self._thread is None:
                self._thread = self._start()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            lines = Verbatim() if verbatim else LineAssembler(prefix) if bar is None else BarAssembler(prefix, bar)
            stream = _Stream(fd, std, prefix, lines, copy)
            self._followed[path] = stream
            self._hand_over(stream)

    def drain_and_forget(self, paths: Iterable[str], timeout: float | None = 0.1) -> bool:
        """
        Copy what is in these files now, whose writers must be dead, with their last lines, and let go of them.

        Waits up to *timeout* seconds (None: as long as it takes) and returns whether all was written by then;
        if not, the copying goes on beside whatever comes next. Paths that are not followed are skipped.
        """
        with self._lock:
            streams = [self._followed.pop(path) for path in paths if path in self._followed]
            for stream in streams:
                self._mark_end(stream)
        deadline = None if timeout is None else monotonic() + timeout
        return all(s.done.wait(None if deadline is None else max(0.0, deadline - monotonic())) for s in streams)

    def catch_up(self, timeout: float) -> bool:
        """
        Wait until all that is in the files now was copied, with lines that have no end yet; up to *timeout* seconds.

        Returns whether it was. The writers may live, and go on.
        """
        with self._lock:
            asked = _CatchUp({stream: os.fstat(stream.fd).st_size for stream in self._followed.values()})
            if self._thread is None or all(stream.shown == size for stream, size in asked.sizes.items()):
                return True
            self._awaited.append(asked)
            os.eventfd_write(self._wake, 1)
        if asked.done.wait(timeout):
            return True
        asked.done.set()  # nobody waits any more
        return False

    def wake(self) -> None:
        """Have the thread, if there is one, call *look* now."""
        with self._lock:
            if self._thread is not None and not self._finished:
                os.eventfd_write(self._wake, 1)

    def finish(self, timeout: float | None = None) -> bool:
        """
        Copy what is in all files now, whose writers must be dead, with their last lines, and end the thread.

        Waits for the console up to *timeout* seconds (None: as long as it takes); returns whether the thread
        has ended. May be called again; nothing can be followed after it.
        """
        with self._lock:
            for stream in self._followed.values():
                self._mark_end(stream)
            self._followed.clear()
            already, self._finished = self._finished, True
            thread = self._thread
            if thread is not None and not already:
                os.eventfd_write(self._wake, 1)
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _mark_end(self, stream: _Stream) -> None:
        # The size of now, not "until nothing comes": a survivor that still writes must not hold us for ever.
        stream.end = os.fstat(stream.fd).st_size
        self._hand_over(stream)

    def _hand_over(self, stream: _Stream) -> None:
        self._queue.append(stream)
        os.eventfd_write(self._wake, 1)

    def _start(self) -> threading.Thread:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inotify = Inotify.open() if self._notify else None
        self._poll, self._woken = select.poll(), select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._woken.register(self._wake, select.POLLIN)
        if self._inotify is not None:
            self._poll.register(self._inotify.fd, select.POLLIN)
        return start_thread(threading.Thread(target=self._run, name="elasticlib-tee", daemon=True))

    def _run(self) -> None:
        # A signal must interrupt the main thread's wait; one that the kernel delivers here would not.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            while self._streams or self._queue or not self._finished:
                self._await_work()
                self._turn()
        except Exception:
            logger.exception("the copy of the workers' output to the console ended early; the log files are whole")
        finally:
            self._close()

    def _await_work(self) -> None:
        left = self._last_found + self._gather - monotonic()
        if left > 0 and not self._is_behind and not self._awaited:
            # Unaware of notices, each of which would cost a wake-up. Whoever waits for lines writes to this descriptor.
            self._woken.poll(left * 1000)
        for fd, _ in self._poll.poll(self._poll_timeout()):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif self._inotify is not None:
                self._note(self._inotify.written())
        while self._queue:
            stream = self._queue.popleft()
            if not stream.done.is_set():
                self._streams.add(stream)
                self._ready.add(stream)
        self._ready.update(stream for stream in self._streams if stream.polled or stream.flows)
        for asked in list(self._awaited):
            self._ready.update(self._streams & asked.sizes.keys())

    def _note(self, written: set[int]) -> None:
        for watch in list(self._watched) if -1 in written else written:
            if stream := self._watched.pop(watch, None):
                stream.watch = None
                self._ready.add(stream)

    def _poll_timeout(self) -> float | None:
        """Milliseconds until there is something to do unasked; None when only a notice can say so."""
        if self._ready or self._queue:
            return 0
        waits = [stream.lines.due - monotonic() for stream in self._streams if stream.lines.due is not None]
        if any(stream.flows for stream in self._streams):
            return 0
        if any(stream.polled for stream in self._streams):
            waits.append(self._pause)
        if (seconds := self._look()) is not None:
            waits.append(seconds)
        # Rounded up: a wake-up before the due time would spin until it.
        return max(0.0, min(waits) * 1000 + 1) if waits else None

    def _arm(self, stream: _Stream) -> None:
        if stream.watch is not None or stream.polled:
            return
        watch = self._inotify.add(stream.fd) if self._inotify is not None else None
        if watch is None or watch in self._watched:
            stream.polled = True
            return
        stream.watch = watch
        self._watched[watch] = stream

    def _turn(self) -> None:
        """One block of each stream that has any, then one write per sink."""
        if not self._ready and not self._awaited and all(stream.lines.due is None for stream in self._streams):
            return
        now = monotonic()
        blocks: dict[Std, list[bytes]] = {Std.OUT: [], Std.ERR: []}
        ended, still, found = [], set(), False
        for stream in self._ready:
            data = self._read(stream) if stream.flows else b""
            if not data:
                self._arm(stream)  # before the read, else a write between the two would go unnoticed
                data = self._read(stream)
            stream.flows = bool(data) and self._gather > 0
            found = found or bool(data)
            if data:
                self._pass_on(stream, stream.lines.feed(data, now), blocks)
            if stream.end is not None and (not data or stream.position >= stream.end):
                self._pass_on(stream, stream.lines.finish(), blocks)
                ended.append(stream)
            elif len(data) == stream.block or (data and stream.end is not None):
                still.add(stream)
                stream.block = BLOCK
        for stream in self._streams:
            if stream.lines.due is not None:
                self._pass_on(stream, stream.lines.tick(now), blocks)
        self._ready, self._is_behind = still, bool(still)
        caught_up = [asked for asked in list(self._awaited) if self._has_read(asked)]
        for stream in {stream for asked in caught_up for stream in asked.sizes} - set(ended):
            self._pass_on(stream, stream.lines.finish(), blocks)
        for std, lines in blocks.items():
            self._write(std, b"".join(lines))
        for stream in self._streams:
            stream.shown = -1 if stream.lines.is_open else stream.position
        for asked in caught_up:
            self._awaited.remove(asked)
            asked.done.set()
        for stream in ended:
            self._let_go(stream)
        if self._inotify is not None:
            # Each notice is followed by the word that its watch ended, which is not worth a wake-up of its own.
            self._note(self._inotify.written())
        if found:
            self._last_found = monotonic()  # and not `now`: what a slow console takes is not for the next lines
        self._pause = _LEAST_PAUSE if found else min(2 * self._pause, _LONGEST_PAUSE)

    def _has_read(self, asked: _CatchUp) -> bool:
        return asked.done.is_set() or all(
            stream.position >= size or stream.unreadable or stream.std in self.broken or stream.done.is_set()
            for stream, size in asked.sizes.items()
        )

    @staticmethod
    def _pass_on(stream: _Stream, lines: bytes, blocks: dict[Std, list[bytes]]) -> None:
        blocks[stream.std].append(lines)
        if stream.copy is not None and lines:
            stream.copy.copy(lines, stream.prefix)  # before the console, which may take its time

    def _read(self, stream: _Stream) -> bytes:
        copied = stream.copy is not None and stream.copy.broken is None
        if (stream.std in self.broken and not copied) or stream.unreadable:
            return b""
        try:
            data = os.pread(stream.fd, stream.block, stream.position)
            if not data and os.fstat(stream.fd).st_size < stream.position:
                stream.position = 0
                data = os.pread(stream.fd, stream.block, 0)
        except OSError as error:
            logger.warning("a worker's log file can no longer be read: %s", error)
            stream.unreadable = True
            return b""
        stream.position += len(data)
        return data

    def _write(self, std: Std, block: bytes) -> None:
        if not block or std in self.broken:
            return
        try:
            self._sinks[std](block)
        except Exception as error:
            self.broken[std] = error
            name = "stdout" if std == Std.OUT else "stderr"
            logger.warning("the console's %s takes no more lines (%r); the workers' log files go on", name, error)

    def _let_go(self, stream: _Stream) -> None:
        if stream.watch is not None and self._inotify is not None:
            self._inotify.remove(stream.watch)
            del self._watched[stream.watch]
        self._streams.discard(stream)
        try:
            os.close(stream.fd)
        finally:
            stream.copy = None
            stream.done.set()

    def _close(self) -> None:
        with self._lock:
            if not self._finished:
                self._thread = None  # a fault ended it: the next file gets another
            for stream in {*self._streams, *self._queue}:
                if not stream.done.is_set():
                    with contextlib.suppress(OSError):  # its descriptors may be what the fault was about
                        self._let_go(stream)
            self._followed.clear()
            self._queue.clear()
            self._watched.clear()
            self._ready.clear()
            while self._awaited:
                self._awaited.popleft().done.set()
            os.close(self._wake)
            if self._inotify is not None:
                os.close(self._inotify.fd)
