"""
The console's copy of the workers' output: one thread that follows their log files.

Other threads call `Tee`. `_Copier` runs in the thread, `_Watches` detects which files were written, and
`_Sinks` writes to the console.

Rules of this file:

* Workers write to files and never wait for this thread.
* The console has one writer and gets only whole lines.
* A stream occupies the thread for at most one block per turn.
* Memory holds one open line and one block per stream, since the files keep the rest.
* The thread sleeps until the kernel reports a write. While lines gather, it sleeps until the next check.
* A sink that fails gets no more lines, which is logged once and kept in `Tee.broken`.
* A bug in this code ends the thread and its streams, and is logged once. The next file starts a new
  thread.
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
from elasticlib.logs._bar_text import BarAssembler, BarText
from elasticlib.logs._console import LineFilter, Sink
from elasticlib.logs._inotify import Inotify
from elasticlib.logs._lines import LineAssembler, Verbatim
from elasticlib.processes import start_thread
from elasticlib.spec import Std

logger = logging.getLogger(__name__)

BLOCK = 256 * 1024
"""Maximum bytes of one stream per turn."""
# Below the size at which malloc maps and unmaps memory for each read.
_FIRST_BLOCK = 64 * 1024
# Seconds between two reads of files without notices: more while they are silent, which saves CPU.
_LEAST_PAUSE, _LONGEST_PAUSE = 0.005, 0.05
GATHER_SECONDS = 0.001
"""Seconds in which lines of a busy stream gather, so that not each line wakes the thread."""
# The kernel kills a program at once for a blocked fault, without the handler that shows its stacks.
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
    """True if no watch is available."""
    flows: bool = False
    """True if it is read again after lines have gathered, without a notice."""
    position: int = 0
    block: int = _FIRST_BLOCK
    end: int | None = None
    """Size of the file after the death of its writers; None while they may live."""
    shown: int = 0
    """Position up to which the sink has the stream; -1 while a line without an end is missing there."""
    unreadable: bool = False


@define(eq=False)
class _CatchUp:
    """A caller that waits until the sinks have the files up to these sizes."""

    sizes: dict[_Stream, int]
    done: threading.Event = field(factory=threading.Event)


class Tee:
    """
    A thread that copies the workers' log files to *out* and *err*, line by line.

    `follow`, `drain_and_forget` and `finish` may be called from any thread. The thread starts with the first
    file. With *notify* False, or without notices of the kernel, it polls every 5 to 50 ms.

    *gather* is for sinks with expensive blocks. Lines that follow within *gather* seconds of the last ones
    wait until that time is over, or until a caller waits for them. *look* is called before the thread waits
    for output. It returns the seconds until the next call if no output arrives, or None.
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
        self._sinks = _Sinks({Std.OUT: out, Std.ERR: err})
        self._notify = notify
        self._gather = gather
        self._look = look
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finished = False
        self._followed: dict[str, _Stream] = {}
        self._copier: _Copier
        """Copier of the thread; other threads add streams and waiting callers under the lock."""

    @property
    def broken(self) -> dict[Std, Exception]:
        """Failed sinks with their exceptions."""
        return self._sinks.broken

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

        *verbatim*: copy byte by byte, without a prefix. *bar* makes the text for a line that is being
        rewritten; None: its state is output as a separate line, once a second.

        Raises OSError if the file does not exist, ValueError if it is followed already. A file that is
        truncated is followed from its new start. *copy* gets the same lines, also after the sink has failed.
        """
        with self._lock:
            if self._finished:
                raise RuntimeError("this tee has finished: create a new one")
            if path in self._followed:
                raise ValueError(f"{path} is already followed")
            # Before the file is opened, so that a thread that cannot start leaves no open file.
            if self._thread is None:
                self._thread = self._start()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            lines: LineAssembler | BarAssembler | Verbatim
            if verbatim:
                lines = Verbatim()
            elif bar is None:
                lines = LineAssembler(prefix)
            else:
                lines = BarAssembler(prefix, bar)

            stream = _Stream(fd, std, prefix, lines, copy)
            self._followed[path] = stream
            self._copier.hand_over(stream)

    def drain_and_forget(self, paths: Iterable[str], timeout: float | None = 0.1) -> bool:
        """
        Copy the rest of these files, whose writers must be dead, with their last lines, and stop following.

        Wait up to *timeout* seconds (None: without limit), and return True if all was written by then.
        Otherwise the copying continues in the thread. Paths that are not followed are skipped.
        """
        with self._lock:
            streams = [self._followed.pop(path) for path in paths if path in self._followed]
            for stream in streams:
                self._mark_end(stream)
        if timeout is None:
            return all(stream.done.wait() for stream in streams)
        deadline = monotonic() + timeout
        return all(stream.done.wait(max(0.0, deadline - monotonic())) for stream in streams)

    def catch_up(self, timeout: float) -> bool:
        """
        Wait up to *timeout* seconds until the present content of the files was copied.

        This includes lines without an end. Return True if all was copied. The writers may be alive and
        continue.
        """
        with self._lock:
            sizes = {stream: os.fstat(stream.fd).st_size for stream in self._followed.values()}
            # Otherwise a call that wrote nothing would wake the thread and wait for it.
            is_shown = all(stream.shown == size for stream, size in sizes.items())
            if self._thread is None or is_shown:
                return True
            waiting = _CatchUp(sizes)
            self._copier.await_catch_up(waiting)

        if waiting.done.wait(timeout):
            return True

        # This caller no longer waits.
        waiting.done.set()
        return False

    def wake(self) -> None:
        """Make the thread, if it runs, call *look* now."""
        with self._lock:
            if self._thread is not None and not self._finished:
                self._copier.wake()

    def finish(self, timeout: float | None = None) -> bool:
        """
        Copy the rest of all files, whose writers must be dead, with their last lines, and end the thread.

        Wait for the console up to *timeout* seconds (None: without limit), and return True if the thread has
        ended. May be called again. Afterwards no file can be followed.
        """
        with self._lock:
            for stream in self._followed.values():
                self._mark_end(stream)
            self._followed.clear()
            # Only the first call wakes the thread, which later closes the descriptor for that.
            already, self._finished = self._finished, True
            thread = self._thread
            if thread is not None and not already:
                self._copier.wake()

        if thread is None:
            return True

        thread.join(timeout)
        return not thread.is_alive()

    def _mark_end(self, stream: _Stream) -> None:
        # A fixed size, and not the end of file: a surviving process that still writes must not delay us.
        stream.end = os.fstat(stream.fd).st_size
        self._copier.hand_over(stream)

    def _start(self) -> threading.Thread:
        copier = _Copier(self._sinks, self._gather, self._look, self._notify)
        thread = threading.Thread(
            target=self._run,
            args=(copier,),
            name="elasticlib-tee",
            daemon=True,
        )
        self._copier = copier
        try:
            return start_thread(thread)
        except BaseException:
            # Only the thread would close its descriptors.
            copier.close()
            raise

    def _run(self, copier: _Copier) -> None:
        # A signal must interrupt the main thread's wait, so the kernel must not deliver it here.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            while copier.has_streams() or not self._finished:
                copier.await_work()
                copier.turn()
        except Exception:
            logger.exception(
                "the workers' output is no longer copied to the console, because of this error; log files are complete"
            )
        finally:
            self._close(copier)

    def _close(self, copier: _Copier) -> None:
        with self._lock:
            # Under the lock, so that no other thread hands a file over that nobody would read.
            if not self._finished:
                # A bug ended the thread: the next file starts another one.
                self._thread = None
            self._followed.clear()
            copier.close()


class _Copier:
    """
    The work of the thread: in each turn it reads a block of each ready stream, then writes once per sink.

    An idle stream has a watch on its file. A ready stream is read in the next turn. A stream without a
    watch, or whose lines gather, is read in each turn.
    """

    def __init__(
        self,
        sinks: _Sinks,
        gather: float,
        look: Callable[[], float | None],
        notify: bool,
    ) -> None:
        self._sinks = sinks
        self._gather = gather
        self._look = look

        # Other threads append to these two, and wake this thread by the descriptor.
        self._queue: deque[_Stream] = deque()
        self._awaited: deque[_CatchUp] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watches = _Watches(Inotify.open() if notify else None)
        self._poll, self._woken = select.poll(), select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._woken.register(self._wake, select.POLLIN)
        self._watches.register(self._poll)
        self._streams: set[_Stream] = set()
        self._ready: set[_Stream] = set()
        self._pause = _LEAST_PAUSE
        self._last_found = -math.inf
        self._is_behind = False
        """True if a stream had more than a block."""

    def hand_over(self, stream: _Stream) -> None:
        """Queue *stream*: it is new, or its end is known. Any thread may call this."""
        self._queue.append(stream)
        self.wake()

    def await_catch_up(self, waiting: _CatchUp) -> None:
        """Set ``waiting.done`` once the sinks have the sizes that it waits for."""
        self._awaited.append(waiting)
        self.wake()

    def wake(self) -> None:
        """End the present wait for work."""
        os.eventfd_write(self._wake, 1)

    def has_streams(self) -> bool:
        """Return True while any stream is followed or queued."""
        return bool(self._streams or self._queue)

    def await_work(self) -> None:
        """Wait until a stream may have new data, and note the ready streams."""
        self._let_lines_gather()
        for fd, _ in self._poll.poll(self._poll_timeout()):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._ready |= self._watches.written()
        self._take_from_queue()
        without_notice = [stream for stream in self._streams if stream.polled or stream.flows]
        self._ready.update(without_notice)
        for waiting in list(self._awaited):
            self._ready.update(self._streams & waiting.sizes.keys())

    def _take_from_queue(self) -> None:
        while self._queue:
            stream = self._queue.popleft()
            # The thread may have seen the end of the stream before it took it from the queue.
            if not stream.done.is_set():
                self._streams.add(stream)
                self._ready.add(stream)

    def _let_lines_gather(self) -> None:
        """Wait until lines have gathered, without notices, since each notice would cost a wake-up."""
        left = self._last_found + self._gather - monotonic()
        is_urgent = self._is_behind or self._awaited
        if left > 0 and not is_urgent:
            # A caller that waits for lines writes to this descriptor.
            self._woken.poll(left * 1000)

    def _poll_timeout(self) -> float | None:
        """Return the milliseconds to wait for notices; None for no limit."""
        if self._ready or self._queue:
            return 0

        waits = []
        is_polled = False
        for stream in self._streams:
            if stream.flows:
                return 0
            if stream.lines.due is not None:
                waits.append(stream.lines.due - monotonic())
            is_polled = is_polled or stream.polled

        if is_polled:
            waits.append(self._pause)
        seconds = self._look()
        if seconds is not None:
            waits.append(seconds)
        if not waits:
            return None

        # Rounded up: after an early wake-up the loop would spin until the due time.
        return max(0.0, min(waits) * 1000 + 1)

    def turn(self) -> None:
        """Copy one block of each ready stream, then write once per sink."""
        if self._is_idle():
            return

        now = monotonic()
        turn = _Turn(now)
        for stream in self._ready:
            self._copy_block(stream, turn)
        for stream in self._streams:
            if stream.lines.due is not None:
                turn.add(stream, stream.lines.tick(now))

        self._ready, self._is_behind = turn.behind, bool(turn.behind)
        caught_up = [waiting for waiting in list(self._awaited) if self._has_read(waiting)]
        if caught_up:
            self._show_open_lines(caught_up, turn)
        for std, lines in turn.lines.items():
            self._sinks.write(std, b"".join(lines))
        self._note_shown(caught_up)

        # After the write, since the end of a stream means for its callers that the console has it.
        for stream in turn.ended:
            self._let_go(stream)
        # After each notice a second one reports the end of its watch: read it now, to save a wake-up.
        self._ready |= self._watches.written()
        if turn.has_found:
            self._pause = _LEAST_PAUSE
            # Not `now`, so that the time of a slow write does not count.
            self._last_found = monotonic()
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _is_idle(self) -> bool:
        if self._ready or self._awaited:
            return False
        return all(stream.lines.due is None for stream in self._streams)

    def _copy_block(self, stream: _Stream, turn: _Turn) -> None:
        data = self._read(stream) if stream.flows else b""
        if not data:
            # The watch comes before the read, so that no write between the two is missed.
            self._watches.watch(stream)
            data = self._read(stream)

        stream.flows = bool(data) and self._gather > 0
        if data:
            turn.has_found = True
            turn.add(stream, stream.lines.feed(data, turn.now))

        if stream.end is not None:
            self._end_or_read_on(stream, stream.end, data, turn)
        # A full block: the kernel gives no notice of what the file holds already.
        elif len(data) == stream.block:
            stream.block = BLOCK
            turn.behind.add(stream)

    @staticmethod
    def _end_or_read_on(stream: _Stream, end: int, data: bytes, turn: _Turn) -> None:
        """End a stream whose writers are dead, or read on; *data* is the latest block."""
        is_over = not data or stream.position >= end
        if is_over:
            turn.add(stream, stream.lines.finish())
            turn.ended.append(stream)
        # No notice will follow.
        else:
            stream.block = BLOCK
            turn.behind.add(stream)

    def _show_open_lines(self, caught_up: list[_CatchUp], turn: _Turn) -> None:
        """Output the lines that have no end yet, since callers wait for them."""
        for stream in {stream for waiting in caught_up for stream in waiting.sizes}:
            if stream not in turn.ended:
                turn.add(stream, stream.lines.finish())

    def _note_shown(self, caught_up: list[_CatchUp]) -> None:
        """Note that the sinks have all lines of this turn, and wake the callers that wait for them."""
        for stream in self._streams:
            stream.shown = -1 if stream.lines.is_open else stream.position
        for waiting in caught_up:
            self._awaited.remove(waiting)
            waiting.done.set()

    def _has_read(self, waiting: _CatchUp) -> bool:
        """Return True if all data for *waiting* was read, or if its caller no longer waits."""
        if waiting.done.is_set():
            return True
        return all(
            stream.position >= size or stream.done.is_set() or self._is_given_up(stream)
            for stream, size in waiting.sizes.items()
        )

    def _is_given_up(self, stream: _Stream) -> bool:
        return stream.unreadable or stream.std in self._sinks.broken

    def _read(self, stream: _Stream) -> bytes:
        if stream.unreadable:
            return b""

        if stream.std in self._sinks.broken:
            # The filtered file gets its lines even after the console has failed.
            is_copied = stream.copy is not None and stream.copy.broken is None
            if not is_copied:
                return b""

        try:
            data = os.pread(stream.fd, stream.block, stream.position)
            if not data and os.fstat(stream.fd).st_size < stream.position:
                # The file was truncated.
                stream.position = 0
                data = os.pread(stream.fd, stream.block, 0)
        except OSError as error:
            logger.warning("a worker's log file can no longer be read: %s", error)
            stream.unreadable = True
            return b""

        stream.position += len(data)
        return data

    def _let_go(self, stream: _Stream) -> None:
        self._watches.unwatch(stream)
        self._streams.discard(stream)
        try:
            os.close(stream.fd)
        finally:
            stream.copy = None
            stream.done.set()

    def close(self) -> None:
        """Close all streams, and wake the callers that wait."""
        for stream in {*self._streams, *self._queue}:
            if not stream.done.is_set():
                # The descriptors may be the cause of the bug.
                with contextlib.suppress(OSError):
                    self._let_go(stream)

        self._queue.clear()
        self._ready.clear()
        while self._awaited:
            self._awaited.popleft().done.set()
        os.close(self._wake)
        self._watches.close()


@define(eq=False)
class _Turn:
    """One turn of the thread: the lines for each sink, and the streams that ended or have more data."""

    now: float
    lines: dict[Std, list[bytes]] = field(factory=lambda: {Std.OUT: [], Std.ERR: []})
    ended: list[_Stream] = field(factory=list)
    behind: set[_Stream] = field(factory=set)
    has_found: bool = False

    def add(self, stream: _Stream, lines: bytes) -> None:
        """Add *lines* of *stream* for its sink, and write them to its filtered file."""
        self.lines[stream.std].append(lines)
        if stream.copy is not None and lines:
            # The file comes first, since the console may be slow.
            stream.copy.copy(lines, stream.prefix)


class _Watches:
    """Watches on the streams' files; each gives one notice. A stream without a watch is polled."""

    def __init__(self, inotify: Inotify | None) -> None:
        self._inotify = inotify
        self._watched: dict[int, _Stream] = {}

    def register(self, poll: select.poll) -> None:
        """Add the descriptor of notices to *poll*."""
        if self._inotify is not None:
            poll.register(self._inotify.fd, select.POLLIN)

    def watch(self, stream: _Stream) -> None:
        """Watch for the next write to the file of *stream*."""
        if stream.watch is not None or stream.polled:
            return
        watch = self._inotify.add(stream.fd) if self._inotify is not None else None
        # The kernel has one watch for a file, also for another path to it: the second stream is polled.
        if watch is None or watch in self._watched:
            stream.polled = True
            return
        stream.watch = watch
        self._watched[watch] = stream

    def written(self) -> set[_Stream]:
        """Return the streams whose files were written, according to the pending notices."""
        if self._inotify is None:
            return set()

        notices = self._inotify.written()
        were_lost = -1 in notices
        found = set()

        # Where the kernel has dropped notices, each of the files may have been written.
        for watch in list(self._watched) if were_lost else notices:
            stream = self._watched.pop(watch, None)
            # None for the second notice of a watch, which reports its end.
            if stream is not None:
                stream.watch = None
                found.add(stream)

        return found

    def unwatch(self, stream: _Stream) -> None:
        """End the watch of *stream*, if it has one."""
        if stream.watch is not None and self._inotify is not None:
            self._inotify.remove(stream.watch)
            del self._watched[stream.watch]

    def close(self) -> None:
        """Forget all watches; no stream may be watched afterwards."""
        self._watched.clear()
        if self._inotify is not None:
            os.close(self._inotify.fd)


class _Sinks:
    """The console's two streams; a stream that fails gets no more output."""

    def __init__(self, sinks: dict[Std, Sink]) -> None:
        self._sinks = sinks
        self.broken: dict[Std, Exception] = {}

    def write(self, std: Std, block: bytes) -> None:
        """Write *block*, unless that stream has failed."""
        if not block or std in self.broken:
            return

        try:
            self._sinks[std](block)
        # Of any class, since the stream may be an object of the user's program.
        except Exception as error:
            self.broken[std] = error
            name = "stdout" if std == Std.OUT else "stderr"
            logger.warning(
                "the console's %s cannot be written (%r); the workers' log files continue",
                name,
                error,
            )
