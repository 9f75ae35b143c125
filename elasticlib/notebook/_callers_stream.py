"""
The output of a job in the caller's ``sys.stdout``: in the cell that waits for it, with its figures and progress bars.

Rules of this file: output is fed by another thread, one block after the other; the caller's context goes with each
write, since a kernel's streams look there for the cell. What the caller's stream or displays fail with is logged, and
costs the job nothing.
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

from elasticlib._clock import monotonic
from elasticlib.logs import GATHER_SECONDS, BarText, console_sink
from elasticlib.notebook._displays import Bars, DisplayText, Tail
from elasticlib.notebook._front_end import can_replace_displays, in_kernel, ipython_shell, is_stdout_replaced
from elasticlib.notebook._marks import Bar, Mark, Reader, written_bar
from elasticlib.notebook._silence import Silence, words

logger = logging.getLogger(__name__)

_MOST_SHOWN = 200_000
"""
Characters of a job's output that a notebook's cell shows from its beginning; `Tail` has the end. JupyterLab draws all
text of a cell again for whatever is added to it: 100,000 lines held its page up for 0.3 s with this limit, for minutes
with a million.
"""
_MOST_DISPLAYED = 50_000_000
"""Bytes of objects that a notebook's cell shows."""
_GATHER = 0.095
"""Seconds between two messages to a notebook's front end: each costs the kernel more than a hundred lines do."""


class _Target:
    """The ``sys.stdout`` of the thread that makes it, as long as it takes text."""

    def __init__(self, word: str) -> None:
        self._stream, self._context = sys.stdout, contextvars.copy_context()
        # A kernel's stream looks here for the cell; in a thread that has none, it would be any cell that runs.
        variable = getattr(self._stream, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(self._stream, "parent_header", {}))
        # A context takes one thread at a time.
        self._lock = threading.Lock()
        self.bytes = None if is_stdout_replaced() else console_sink(sys.stdout)
        """Takes the bytes as they are, where that is the same place."""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.left = _MOST_SHOWN if in_kernel() else sys.maxsize
        self.tail: Tail | None = None
        """Takes the text that comes when the cell has got all that it shows."""
        self.is_within_line = False
        """Whether the line that the cell got last has not ended."""
        self.has_tail = False
        """Whether the cell has a display of it."""
        self.reader = Reader(word)
        self._displays = getattr(ipython_shell(), "display_pub", None)
        self._displays_left = _MOST_DISPLAYED
        variable = getattr(self._displays, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(self._displays, "parent_header", {}))
        self.name = f"elasticlib-{secrets.token_hex(8)}"
        """Begins the names of its displays."""
        self.bars = Bars(self.name, can_change=can_replace_displays(self._stream, self._displays))

    def say(self, text: str) -> None:
        def write(stream: TextIO) -> None:
            stream.write(text)
            stream.flush()

        if text:
            self.do(write)

    def display(self, mark: Mark) -> None:
        """Show the object itself; where that cannot be, the text that stands for it."""
        self._displays_left -= mark.length
        try:
            if self._displays is None or self._displays_left < 0:
                raise ValueError("it shows no more objects")
            with open(mark.path, "rb") as file:
                file.seek(mark.offset)
                message = loads(file.read(mark.length))
            with self._lock:
                if "clear" in message:
                    self._context.run(self._displays.clear_output, message["wait"])
                else:
                    self._context.run(functools.partial(self._displays.publish, **message))
        except Exception:
            self.say(f"{mark.text}\n" if mark.text else "")

    def show(self, picture: DisplayText) -> None:
        """Make a display of text, or replace what is in it."""
        displays: Any = self._displays
        data, transient = {"text/plain": picture.text}, {"display_id": picture.name}
        publish = functools.partial(displays.publish, data, {}, transient=transient, update=not picture.is_new)
        try:
            with self._lock:
                self._context.run(publish)
        except Exception as error:
            self.bars.can_change = False
            logger.warning("progress bars come as lines: the notebook takes no displays (%r)", error)

    def do(self, write: Callable[[TextIO], None]) -> None:
        with self._lock:
            if self._stream is None:
                return
            try:
                self._context.run(write, self._stream)
            except Exception as error:
                self._stream = None
                logger.warning("sys.stdout takes no more of the workers' output (%r); their log files go on", error)


class CallersStream:
    """
    The ``sys.stdout`` of whoever makes it, for output that comes in another thread: in the caller's cell, or wherever a
    test or a widget has put it. Where that fails, nothing more is written to it, which is logged.
    """

    def __init__(self) -> None:
        self.files: Callable[[], str] = str
        """Tells the file, or the folder of several, with all of the output."""
        self.is_full = False
        """Whether a cell has got all that it shows, so that the files are needed."""
        self.catch_up: Callable[[float], bool] = lambda _: True
        """Waits, up to so many seconds, until it has got what is in the files."""
        self.word = secrets.token_hex(8) if in_kernel() else ""
        """With which workers mark the objects that they display; empty where only text is shown."""
        self.gather = _GATHER if self.word else GATHER_SECONDS
        """As of any `Console`; whoever has a stream to which a block is dear may set it before the job begins."""
        self.bar: BarText | None = functools.partial(written_bar, self.word) if self.word else None
        """What it takes for a state of a progress bar."""
        self._target = _Target(self.word)
        self._silence: Silence | None = None
        self._wake: Callable[[], None] = lambda: None
        self._is_pools = False
        self._words: Callable[[float], str] = str
        self._note = ""
        """The display that says that nothing comes, while one does."""
        self._notes = 0

    def watch(self, name: str, ranks: Sequence[int] | None, *, is_pool: bool, is_started: bool) -> None:
        """Have a cell say when nothing comes for long from the *ranks*, None for all, of the job that is called so."""
        if self.word and (ranks is None or len(ranks) > 0):
            kind = "pool" if is_pool else "started" if is_started else "call"
            self._words = functools.partial(words, name, kind, ranks)
            self._is_pools = is_pool
            self._silence = Silence(self._show_silence)

    def turn_here(self) -> None:
        """From now on, up to `rest`, it is that of this caller, who waits for output."""
        self._target = _Target(self.word)
        if self._silence is not None:
            self._silence.begin()
            self._wake()

    def rest(self) -> None:
        """The caller does not wait for output any more."""
        if self._silence is not None:
            self._silence.end()
        self._show_tail(self._target, is_last=True)

    def begin(self, catch_up: Callable[[float], bool], wake: Callable[[], None]) -> None:
        """Workers are about to start; *catch_up* and *wake* are to be ours."""
        self.catch_up, self._wake = catch_up, wake
        if self._silence is not None and not self._is_pools:
            self._silence.begin()

    def look(self) -> float | None:
        """Say it if nothing has come for long; seconds until that may be so, None where nobody waits."""
        return None if self._silence is None else self._silence.look()

    def close(self) -> None:
        """The job is over."""
        if self._silence is not None:
            self._silence.end()
        self._show_tail(self._target, is_last=True)

    def _show_silence(self, seconds: float | None) -> None:
        """Say for how long nothing has come; None: something has."""
        target = self._target
        if seconds is None:
            note, self._note = self._note, ""
            if note:
                target.show(DisplayText(note, "", is_new=False))
        elif target.bars.can_change:
            is_new = not self._note
            self._notes += is_new
            self._note = self._note or f"{target.name}-silence-{self._notes}"
            target.show(DisplayText(self._note, self._words(seconds), is_new))

    def __call__(self, block: bytes) -> None:
        """Write *block*, which may end within a character."""
        if self._silence is not None:
            self._silence.heard()
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
        self._show(target, target.bars.changes())
        self._show_tail(target)

    def _show(self, target: _Target, parts: Iterable[str | DisplayText]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._write(target, part)
            else:
                target.show(part)

    def _write(self, target: _Target, text: str) -> None:
        """Write *text* while the cell takes more, up to its last whole line; the rest is for the tail."""
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
        if target.tail is not None and not target.bars.can_change:
            text += "\n" * target.is_within_line + f"[... the rest is in {self.files()}]\n"
        target.say(text)

    def _show_tail(self, target: _Target, *, is_last: bool = False) -> None:
        """Replace the last lines that the cell shows; where it can replace nothing, write the last of them."""
        tail = target.tail
        if tail is None or not tail.is_changed:
            return
        if target.bars.can_change:
            target.show(DisplayText(f"{target.name}-tail", tail.text(self.files()), is_new=not target.has_tail))
            target.has_tail = True
        elif is_last:
            target.say(f"{tail.text(self.files())}\n")

    def say(self, text: str) -> None:
        """Write *text*, where it is a cell."""
        if self.word:
            self._target.say(text)
