"""
Reports of silence in a cell: their times, and their text.

Rules of this file: the first report comes after 20 s, which is longer than a launch takes. Another one
follows when this or a later silence of the cell is twice as long as the last reported one. A program
that writes once a minute causes one or two reports. New output removes the report. The thread that shows
the output also makes the reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elasticlib._clock import Clock, monotonic
from elasticlib._wording import duration
from elasticlib.stacks import ranks_text

FIRST = 20.0
"""Seconds without output, from the start of the workers on, until the first report."""


class Silence:
    """Silence of one cell: *say* gets the seconds without output, and None when output arrives."""

    def __init__(self, say: Callable[[float | None], None], clock: Clock = monotonic) -> None:
        self._say = say
        self._clock = clock
        self._limit = FIRST
        self._since: float | None = None
        """Time of the last output, in seconds; None while nobody waits for output."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to expect output."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    def heard(self) -> None:
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


def words(name: str, kind: str, ranks: Sequence[int] | None, seconds: float) -> str:
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
        "pool": "an interrupt ends this call; pool.job.stacks(), from a thread, shows the stacks of all ranks",
        "call": "an interrupt ends it; job.stacks() of a job begun with .start() shows the stacks of all ranks",
    }[kind]
    return f"[job {name!r} runs, but {who} for {duration(seconds)}: {look}]"
