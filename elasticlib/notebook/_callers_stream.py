"""
The output of a job in the caller's ``sys.stdout``: in the waiting cell, with figures and progress bars.

Rules of this file: another thread feeds the output, one block after the other. Each write runs in the
caller's context, since a kernel's streams find the cell there. Errors of the caller's stream or displays
are logged, and do not affect the job.
"""

from __future__ import annotations

import codecs
import contextvars
import functools
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from json import loads
from typing import Any, TextIO

from elasticlib._clock import Clock, monotonic
from elasticlib._wording import duration
from elasticlib.logs import GATHER_SECONDS, BarText, console_sink
from elasticlib.notebook._displays import Bars, DisplayText, Tail
from elasticlib.notebook._front_end import can_replace_displays, in_kernel, ipython_shell, is_stdout_replaced
from elasticlib.notebook._marks import Bar, Mark, Reader, written_bar
from elasticlib.stacks import ranks_text

logger = logging.getLogger(__name__)

_MOST_SHOWN = 200_000
"""
Maximum characters that a notebook's cell shows from the beginning of a job's output; `Tail` has the end.

JupyterLab draws all text of a cell again after each addition. With this limit 100,000 lines blocked its
page for 0.3 s, with a limit of a million for minutes.
"""
_MOST_DISPLAYED = 50_000_000
"""Maximum bytes of objects that a notebook's cell shows."""
_GATHER = 0.095
"""Seconds between two messages to a notebook's front end: each costs the kernel more than a hundred lines."""

FIRST_REPORT = 20.0
"""Seconds without output, from the start of the workers on, until a cell reports silence."""


class _Target:
    """The ``sys.stdout`` of the thread that makes this object, until a write fails."""

    def __init__(self, word: str) -> None:
        self._stream, self._context = sys.stdout, contextvars.copy_context()
        self._keep_cell_of(self._stream)

        # Only one thread at a time can enter a context.
        self._lock = threading.Lock()
        self.bytes = None if is_stdout_replaced() else console_sink(sys.stdout)
        """Sink for unchanged bytes; None if ``sys.stdout`` was replaced, and takes text."""

        # A block may end within a character, whose rest comes with the next one.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.left = _MOST_SHOWN if in_kernel() else sys.maxsize
        self.tail: Tail | None = None
        """Receives the text beyond the cell's limit; None before."""
        self.is_within_line = False
        """True if the last line in the cell has no end yet."""
        self.has_tail = False
        """True if the cell has a display of the tail."""
        self.reader = Reader(word)
        self._displays = getattr(ipython_shell(), "display_pub", None)
        self._displays_left = _MOST_DISPLAYED
        self._keep_cell_of(self._displays)

        # Random, because a front end replaces every display of a name, also those of other calls.
        self.name = f"elasticlib-{secrets.token_hex(8)}"
        """Prefix of the names of its displays."""
        self.bars = Bars(self.name, can_change=can_replace_displays(self._stream, self._displays))

    def _keep_cell_of(self, output: Any) -> None:
        # A kernel's output finds the cell here; in a thread without one, it would use any running cell.
        variable = getattr(output, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(output, "parent_header", {}))

    def say(self, text: str) -> None:
        def write(stream: TextIO) -> None:
            stream.write(text)
            stream.flush()

        if text:
            self.do(write)

    def display(self, mark: Mark) -> None:
        """Show the object of *mark*, or its replacement text if that fails."""
        self._displays_left -= mark.length
        try:
            if self._displays is None or self._displays_left < 0:
                # Beyond the limit the text replaces the object, as after any failure.
                raise ValueError("it shows no more objects")
            with open(mark.path, "rb") as file:
                file.seek(mark.offset)
                message = loads(file.read(mark.length))

            with self._lock:
                if "clear" in message:
                    self._context.run(self._displays.clear_output, message["wait"])
                else:
                    self._context.run(functools.partial(self._displays.publish, **message))
        # The file may be gone, and a front end may refuse the object: its text can always be shown.
        except Exception:
            self.say(f"{mark.text}\n" if mark.text else "")

    def show(self, picture: DisplayText) -> None:
        """Make a display of text, or replace its text."""
        displays: Any = self._displays
        data, transient = {"text/plain": picture.text}, {"display_id": picture.name}
        publish = functools.partial(displays.publish, data, {}, transient=transient, update=not picture.is_new)
        try:
            with self._lock:
                self._context.run(publish)
        except Exception as error:
            self.bars.can_change = False
            logger.warning("progress bars are printed as lines, because the notebook did not display them (%r)", error)

    def do(self, write: Callable[[TextIO], None]) -> None:
        with self._lock:
            if self._stream is None:
                return
            try:
                self._context.run(write, self._stream)
            except Exception as error:
                self._stream = None
                logger.warning("sys.stdout cannot be written (%r); the workers' log files continue", error)


class CallersStream:
    """
    The caller's ``sys.stdout``, for output from another thread.

    This is the caller's cell, or the stream that a test or a widget has set. If a write fails, that is
    logged, and nothing more is written to it.
    """

    def __init__(self) -> None:
        self.files: Callable[[], str] = str
        """Returns the file, or the folder of several files, with the complete output."""
        self.is_full = False
        """True if a cell has reached its limit, so that the user needs the files."""
        self.catch_up: Callable[[float], bool] = lambda _: True
        """Waits, up to the given seconds, until the present content of the files was written here."""
        self.word = secrets.token_hex(8) if in_kernel() else ""
        """Key with which workers mark the objects that they display; empty if only text is shown."""
        self.gather = _GATHER if self.word else GATHER_SECONDS
        """As in `Console`. For a stream with expensive blocks the caller may set it before the job starts."""
        self.bar: BarText | None = functools.partial(written_bar, self.word) if self.word else None
        """Makes the text for a state of a progress bar; None: lines only."""
        self._target = _Target(self.word)
        self._silence: Silence | None = None
        self._wake: Callable[[], None] = lambda: None
        self._is_pools = False
        self._silence_text: Callable[[float], str] = str
        self._note = ""
        """Name of the display that reports silence; empty while none does."""
        self._notes = 0

    def watch(self, name: str, ranks: Sequence[int] | None, *, is_pool: bool, is_started: bool) -> None:
        """Report in the cell a long silence of *ranks* (None: all) of the job *name*."""
        # While no rank is shown, silence means nothing.
        if self.word and (ranks is None or len(ranks) > 0):
            kind = "pool" if is_pool else "started" if is_started else "call"
            self._silence_text = functools.partial(silence_text, name, kind, ranks)
            self._is_pools = is_pool
            self._silence = Silence(self._show_silence)

    def turn_here(self) -> None:
        """Send output to the calling thread's ``sys.stdout``; until `rest` its user waits for output."""
        self._target = _Target(self.word)
        if self._silence is not None:
            self._silence.begin()
            self._wake()

    def rest(self) -> None:
        """Stop the reports of silence at the end of a call or of the job, and show the last lines."""
        if self._silence is not None:
            self._silence.end()
        self._show_tail(self._target, is_last=True)

    def begin(self, catch_up: Callable[[float], bool], wake: Callable[[], None]) -> None:
        """Prepare for the start of workers; *catch_up* and *wake* are as in `Console.begin`."""
        self.catch_up, self._wake = catch_up, wake
        # The workers of a pool are silent between its calls: a call begins the wait for output.
        if self._silence is not None and not self._is_pools:
            self._silence.begin()

    def look(self) -> float | None:
        """Report a long silence. Return the seconds until the next check; None while nobody waits."""
        return None if self._silence is None else self._silence.look()

    def _show_silence(self, seconds: float | None) -> None:
        """Show for how many *seconds* no output has arrived; None: remove that text."""
        target = self._target
        if seconds is None:
            note, self._note = self._note, ""
            if note:
                target.show(DisplayText(note, "", is_new=False))
        elif target.bars.can_change:
            is_new = not self._note
            self._notes += is_new
            self._note = self._note or f"{target.name}-silence-{self._notes}"
            target.show(DisplayText(self._note, self._silence_text(seconds), is_new))

    def __call__(self, block: bytes) -> None:
        """Write *block*, which may end in the middle of a UTF-8 character."""
        if self._silence is not None:
            self._silence.note_output()

        # Read once, since a later call in another thread may turn the stream to its own cell.
        target = self._target
        if (sink := target.bytes) is not None:
            target.do(lambda _: sink(block))
            return

        text = target.decoder.decode(block)
        if not self.word:
            self._write(target, text)
            return

        for part in target.reader.feed(text):
            if isinstance(part, Mark):
                target.display(part)
            elif isinstance(part, Bar):
                self._show(target, target.bars.take(part, monotonic()))
            else:
                self._write(target, part)

        # Once a block: each display is one message, whatever number of its bars has changed.
        self._show(target, target.bars.changes())
        self._show_tail(target)

    def _show(self, target: _Target, parts: Iterable[str | DisplayText]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._write(target, part)
            else:
                target.show(part)

    def _write(self, target: _Target, text: str) -> None:
        """Write *text* up to the limit of the cell, which ends after a whole line; the tail gets the rest."""
        if target.tail is not None:
            target.tail.feed(text)
            return

        if len(text) > target.left:
            self.is_full = True
            whole, newline, _ = text[: target.left].rpartition("\n")
            head = f"{whole}{newline}"
            target.tail = Tail()
            target.tail.feed(text[len(head) :])
            text = head

        target.left -= len(text)
        target.is_within_line = not text.endswith("\n") if text else target.is_within_line

        # No display will follow with the last lines, so the cell names the files where it stops.
        if target.tail is not None and not target.bars.can_change:
            text += "\n" * target.is_within_line + f"[... the rest is in {self.files()}]\n"
        target.say(text)

    def _show_tail(self, target: _Target, *, is_last: bool = False) -> None:
        """Replace the last lines in the cell. If it cannot replace text, write them once, when *is_last*."""
        tail = target.tail
        if tail is None or not tail.is_changed:
            return
        if target.bars.can_change:
            target.show(DisplayText(f"{target.name}-tail", tail.text(self.files()), is_new=not target.has_tail))
            target.has_tail = True
        elif is_last:
            target.say(f"{tail.text(self.files())}\n")

    def say(self, text: str) -> None:
        """Write *text*, but only to a notebook's cell."""
        if self.word:
            self._target.say(text)


# Reports of silence in a cell. The first report comes after 20 s, which is longer than a launch takes. Another
# one follows when this or a later silence of the cell is twice as long as the last reported one: a program
# that writes once a minute causes one or two reports.


class Silence:
    """Silence of one cell: *say* gets the seconds without output, and None when output arrives."""

    def __init__(self, say: Callable[[float | None], None], clock: Clock = monotonic) -> None:
        self._say = say
        self._clock = clock
        self._limit = FIRST_REPORT
        self._since: float | None = None
        """Time of the last output, in seconds; None while nobody waits for output."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to expect output."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    def note_output(self) -> None:
        """Note that output has arrived, before it is shown, and remove the report."""
        with self._lock:
            if self._since is not None:
                self._since = self._clock()
            self._say(None)

    def end(self) -> None:
        """Expect no output until the next `begin`, and remove the report."""
        with self._lock:
            self._since = None
            self._say(None)

    def look(self) -> float | None:
        """Report a silence that is due. Return the seconds until the next check; None while nobody waits."""
        with self._lock:
            if self._since is None:
                return None
            seconds = self._clock() - self._since
            if seconds >= self._limit:
                while self._limit <= seconds:
                    self._limit *= 2
                self._say(seconds)
            return self._limit - seconds


def silence_text(name: str, kind: str, ranks: Sequence[int] | None, seconds: float) -> str:
    """
    Return the report for the job *name*.

    *kind* is ``call``, ``started`` or ``pool``. *ranks* are the shown ranks; None for all.
    """
    if ranks is None:
        who = "no rank has written anything"
    else:
        who = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} written nothing"

    look = {
        "started": "elasticlib.jobs() lists it: .stacks() shows the stacks of all ranks, .stop() ends it",
        "pool": "interrupt the kernel to end this call; pool.job.stacks(), in a thread, shows the stacks of all ranks",
        "call": "interrupt the kernel to end it; to see the stacks of all ranks, use .start() and then job.stacks()",
    }[kind]
    return f"[job {name!r} runs, but {who} for {duration(seconds)}: {look}]"
