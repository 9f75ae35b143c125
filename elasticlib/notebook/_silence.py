"""
When a cell says that its job writes nothing, and in which words.

Rules of this file: it is said after 20 s, which is longer than a launch takes, and then each time that the silence, or
a later one of the same cell, is twice as long as what was said last: a program that writes once a minute hears of it
once or twice. What was said goes when something comes. It has no thread: the one that shows the output says it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elasticlib._clock import Clock, monotonic
from elasticlib._wording import duration
from elasticlib.stacks import ranks_text

FIRST = 20.0
"""Seconds without output, counted from the start of the workers, until that is said."""


class Silence:
    """Of one cell's output: *say* gets the seconds for which there was none, and None when that is over."""

    def __init__(self, say: Callable[[float | None], None], clock: Clock = monotonic) -> None:
        self._say = say
        self._clock = clock
        self._limit = FIRST
        self._since: float | None = None
        """When output came last; None while nobody waits for it."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """From now on there should be output."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    def heard(self) -> None:
        """Output came, and is about to be shown."""
        with self._lock:
            if self._since is not None:
                self._since = self._clock()
            self._say(None)

    def end(self) -> None:
        """Nobody waits for output, up to the next `begin`."""
        with self._lock:
            self._since = None
            self._say(None)

    def look(self) -> float | None:
        """Say it if it is time; return the seconds until the next look, None while nobody waits."""
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
    """The line for a job called *name*, a ``call``, one that was ``started``, or a ``pool``; *ranks* are shown."""
    if ranks is None:
        who = "no rank has written anything"
    else:
        who = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} written nothing"
    look = {
        "started": "elasticlib.jobs() lists it: .stacks() tells where all ranks are, .stop() ends it",
        "pool": "an interrupt ends this call; pool.job.stacks(), from a thread, tells where all ranks are",
        "call": "an interrupt ends it; begun with .start(), its job.stacks() tells where all ranks are",
    }[kind]
    return f"[job {name!r} runs, but {who} for {duration(seconds)}: {look}]"
