"""
The output of a job that runs beside its program: one file for each worker, read while it grows.

Rules of this file: stdout and stderr of a worker go to one file, in their order; of rank 0 they go to the console too.
The files stay as long as the job's object; after a failure they stay for a look.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import functools
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TextIO

from elasticlib import _in_notebooks
from elasticlib._marks import Mark, Reader, without
from elasticlib.errors import ConfigError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.logs._console import console_sink
from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std

logger = logging.getLogger(__name__)

_MOST_SHOWN = 1_000_000
"""Characters of a job's output that a notebook's cell shows: browsers do not bear much more."""
_MOST_DISPLAYED = 50_000_000
"""Bytes of objects that a notebook's cell shows."""
_TAIL = 8192
"""Bytes at the end of a file in which its last line is looked for."""


class JobLogs(DefaultLogsSpecs):
    """
    Where the output goes unless `LaunchConfig.logs_specs` says it; that of the ranks *show* is shown (None: of all).

    Where several are shown, a short prefix tells which one wrote a line.
    """

    def __init__(self, show: Collection[int] | None = (0,)) -> None:
        super().__init__(redirects=Std.ALL)
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
        self.reader = Reader(word)
        self._displays = getattr(_in_notebooks.shell(), "display_pub", None)
        self._displays_left = _MOST_DISPLAYED
        variable = getattr(self._displays, "_parent_header", None)
        if isinstance(variable, contextvars.ContextVar):
            self._context.run(variable.set, getattr(self._displays, "parent_header", {}))

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
                told = json.loads(file.read(mark.length))
            with self._lock:
                if "clear" in told:
                    self._context.run(self._displays.clear_output, told["wait"])
                else:
                    self._context.run(functools.partial(self._displays.publish, **told))
        except Exception:
            self.say(f"{mark.text}\n" if mark.text else "")

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
        """Tells the folder with all of the output."""
        self.is_full = False
        """Whether a cell has got all that it shows, so that the files are needed."""
        self.catch_up: Callable[[float], bool] = lambda _: True
        """Waits, up to so many seconds, until it has got what is in the files; set by whatever reads them."""
        self.word = secrets.token_hex(8) if in_kernel() else ""
        """With which workers mark the objects that they display; empty where only text is shown."""
        self._target = _Target(self.word)

    def turn_here(self) -> None:
        """From now on it is that of this caller."""
        self._target = _Target(self.word)

    def __call__(self, block: bytes) -> None:
        """Write *block*, which may end within a character."""
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
            else:
                self._write(target, part)

    def _write(self, target: _Target, text: str) -> None:
        if len(text) > target.left:
            if target.left <= 0:
                return
            self.is_full = True
            text = f"{text[: target.left]}\n[... the rest is in {self.files()}]\n"
            target.left = 0
        target.left -= len(text)
        target.say(text)

    def say(self, text: str) -> None:
        """Write *text*."""
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


def shown_ranks(config: LaunchConfig) -> Sequence[int] | None:
    """The ranks whose output is shown; None: all."""
    return None if config.show == "all" else (0,) if config.show is None else tuple(config.show)


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
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return without(file.read())


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
