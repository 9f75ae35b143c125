"""
The output of a job that runs beside its program: one file for each worker, read while it grows.

Rules of this file: stdout and stderr of a worker go to one file, in their order; of rank 0 they go to the console too.
The files stay as long as the job's object; after a failure they stay for a look. Workers that their pool has stopped
have not failed.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import functools
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from json import loads
from typing import Any, TextIO

from elasticlib import _in_notebooks, records
from elasticlib._clock import monotonic
from elasticlib._marks import Bar, Mark, Reader, without, written_bar
from elasticlib.errors import ConfigError
from elasticlib.job import _front_end
from elasticlib.job._bars import Bars, Picture
from elasticlib.job._silence import Silence, words
from elasticlib.job._tail import Tail
from elasticlib.logs import (
    GATHER_SECONDS,
    BarText,
    DefaultLogsSpecs,
    console_sink,
    note_of_removed_bytes,
    skip_hole,
    warn_of_strange_ranks,
)
from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std
from elasticlib.stacks import number_ranges, ranks_text

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
_NEWLINE = b"\n"
_TAIL = 8192
"""Bytes at the end of a file in which its last line is looked for."""


class JobLogs(DefaultLogsSpecs):
    """
    Where the output goes unless `LaunchConfig.logs_specs` says it; that of the ranks *show* is shown (None: of all).

    Where several are shown, a short prefix tells which one wrote a line.
    """

    def __init__(self, show: Collection[int] | None = (0,)) -> None:
        super().__init__(redirects=Std.ALL)
        self.keeps_streams = False  # the job's object reads them, and removes them
        self._show = show
        self.default_prefix = "" if show is not None and len(show) <= 1 else "[${rank}] "

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """One file for each rank."""
        dest = super().reify(envs)
        for rank, path in dest.stderrs.items():
            os.unlink(path)
            dest.stderrs[rank] = dest.stdouts[rank]
        shown = {rank for rank, env in envs.items() if self._show is None or int(env["RANK"]) in self._show}
        dest.tee_stdouts = {rank: path for rank, path in dest.stdouts.items() if rank in shown}
        return dest

    def temporary_round(self) -> str:
        """None that an agent may remove: the job's object does so."""
        return ""

    def remove_if_temporary(self, only_if_empty: bool = False) -> None:
        """After success they are still there to be read; after a failure they stay for a look."""
        if only_if_empty:
            super().remove_if_temporary(only_if_empty)


class _Target:
    """The ``sys.stdout`` of the thread that makes it, as long as it takes text."""

    def __init__(self, word: str) -> None:
        self._stream, self._context = sys.stdout, contextvars.copy_context()
        # A kernel's stream looks here for the cell; in a thread that has none, it would be any cell that runs.
        variable = getattr(self._stream, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(self._stream, "parent_header", {}))
        self._lock = threading.Lock()  # a context takes one thread at a time
        self.bytes = None if is_replaced() else console_sink(sys.stdout)
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
        self._displays = getattr(_in_notebooks.shell(), "display_pub", None)
        self._displays_left = _MOST_DISPLAYED
        variable = getattr(self._displays, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(self._displays, "parent_header", {}))
        self.name = f"elasticlib-{secrets.token_hex(8)}"
        """Begins the names of its displays."""
        self.bars = Bars(self.name, can_change=_front_end.is_cell(self._stream, self._displays))

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
                told = loads(file.read(mark.length))
            with self._lock:
                if "clear" in told:
                    self._context.run(self._displays.clear_output, told["wait"])
                else:
                    self._context.run(functools.partial(self._displays.publish, **told))
        except Exception:
            self.say(f"{mark.text}\n" if mark.text else "")

    def show(self, picture: Picture) -> None:
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
            self._silence = Silence(self._tell)

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

    def _tell(self, seconds: float | None) -> None:
        """Say for how long nothing has come; None: something has."""
        target = self._target
        if seconds is None:
            note, self._note = self._note, ""
            if note:
                target.show(Picture(note, "", is_new=False))
        elif target.bars.can_change:
            is_new = not self._note
            self._notes += is_new
            self._note = self._note or f"{target.name}-silence-{self._notes}"
            target.show(Picture(self._note, self._words(seconds), is_new))

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

    def _show(self, target: _Target, parts: Iterable[str | Picture]) -> None:
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
            target.show(Picture(f"{target.name}-tail", tail.text(self.files()), is_new=not target.has_tail))
            target.has_tail = True
        elif is_last:
            target.say(f"{tail.text(self.files())}\n")

    def say(self, text: str) -> None:
        """Write *text*, where it is a cell."""
        if self.word:
            self._target.say(text)


def own_logs(config: LaunchConfig, keeps_all: bool) -> LogsSpecs:
    """Where the output goes: where the caller said, to a file for each rank, or nowhere but where it goes anyway."""
    if config.logs_specs is not None:
        if config.show is not None:
            raise ConfigError(
                f"show={config.show!r} has no effect beside logs_specs: give that one's tee, or leave it out"
            )
        return config.logs_specs
    if not keeps_all and config.show is None:
        return DefaultLogsSpecs()
    return JobLogs(shown_ranks(config))


def announce_log_folder(logs: LogsSpecs) -> None:
    """Say which temporary folder holds the streams that the caller asked for: nobody could find them otherwise."""
    if isinstance(logs, DefaultLogsSpecs) and (folder := logs.kept_temporary_folder()):
        records.log(records.StreamsKept(folder))


def remove_logs(logs: LogsSpecs, asked: LogsSpecs, *, succeeded: bool, is_kept: bool) -> None:
    """
    Let go of the files of workers that are gone, and tell what the caller *asked* for where they are.

    *is_kept*: unless they have *succeeded*, people are told of files that stay for a look.
    """
    if isinstance(logs, DefaultLogsSpecs) and isinstance(asked, DefaultLogsSpecs):
        logs.forget_unused()
        logs.put_away(succeeded=succeeded)
        asked.tell(logs)
        stays = is_kept or not isinstance(logs, JobLogs)
        if stays and not succeeded and logs.root_log_dir:
            records.log(records.LogsKept(logs.root_log_dir))


def shown_ranks(config: LaunchConfig) -> Sequence[int] | None:
    """The ranks whose output is shown; None: all."""
    return None if config.show == "all" else (0,) if config.show is None else tuple(config.show)


def warn_of_ranks(logs: LogsSpecs, workers: int, config: LaunchConfig) -> None:
    """Say which ranks *logs* or ``show`` names and a node of so many *workers* does not have."""
    warn_of_strange_ranks(logs, workers)
    if config.max_nodes > 1:  # the other nodes of a job may have them
        return
    shown = set(shown_ranks(config) or ())
    strange = {rank for rank in shown if rank >= workers}
    if not strange:
        return
    effect = "no output is shown" if strange == shown else "that has no effect here"
    logger.warning(
        "show=%r names %s, but this job has %s only: %s",
        config.show,
        ranks_text(strange),
        number_ranges(range(workers)),
        effect,
    )


def in_kernel() -> bool:
    """Whether this program is a notebook's kernel."""
    return hasattr(_in_notebooks.shell(), "kernel")


def is_replaced() -> bool:
    """Whether ``sys.stdout`` is another place than that to which child processes write."""
    stream = sys.stdout
    if stream is None or in_kernel():
        return stream is not None
    try:
        here, theirs = os.fstat(stream.fileno()), os.fstat(1)
    except (AttributeError, OSError, ValueError):
        return True  # it has no descriptor
    return (here.st_dev, here.st_ino) != (theirs.st_dev, theirs.st_ino)


def text_of(path: str) -> str:
    """What is in the file by now; bytes that are no UTF-8 show as U+FFFD."""
    with open(path, "rb", buffering=0) as file:
        gone = skip_hole(file.fileno())
        data = file.read()
    if not gone:
        return without(data.decode("utf-8", "replace"))
    return f"{note_of_removed_bytes(gone)}\n{without(data.partition(_NEWLINE)[2].decode('utf-8', 'replace'))}"


def last_line(paths: Sequence[str]) -> str:
    """
    The last line with something in it, as a terminal would show it; empty where there is none.

    Of several files it is that of the one which was written last.
    """
    found = sorted({path: _written_at(path) for path in paths if path}.items(), key=lambda each: -each[1])
    return next(filter(None, (_last_line(path) for path, _ in found)), "")


def _written_at(path: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _last_line(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        for line in reversed(without(file.read().decode("utf-8", "replace")).splitlines()):
            if line.strip():
                return line.strip()
    return ""
