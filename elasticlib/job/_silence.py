"""
When a cell says that its job writes nothing, and in which words. Pure.

Rules of this file: time is an argument. It is said after 20 s, which is longer than a launch takes, and then each time
that the silence, or a later one of the same cell, is twice as long as what was said last: a program that writes once a
minute hears of it once or twice. What was said goes when something comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticlib.stacks import ranks_text

FIRST = 20.0
"""Seconds without output, counted from the start of the workers, until that is said."""


class Silence:
    """Of one cell's output. It is counted from `begin`, or from what was heard last, to `end`."""

    def __init__(self) -> None:
        self._limit = FIRST
        self._since: float | None = None
        self._is_told = False

    @property
    def due(self) -> float | None:
        """When `tick` has something to say, if nothing comes; None while nobody waits."""
        return None if self._since is None else self._since + self._limit

    def begin(self, now: float) -> None:
        """From now on there should be output."""
        if self._since is None:
            self._since = now

    def heard(self, now: float) -> bool:
        """Output came; returns whether the cell still says that there is none."""
        if self._since is not None:
            self._since = now
        was_told, self._is_told = self._is_told, False
        return was_told

    def end(self) -> bool:
        """Nobody waits for output any more; returns whether the cell still says that there is none."""
        self._since = None
        return self.heard(0.0)

    def tick(self, now: float) -> float | None:
        """For how long there was none, if that is to be said at *now*."""
        if self._since is None or self.due is None or now < self.due:
            return None
        seconds = now - self._since
        while self._limit <= seconds:
            self._limit *= 2
        self._is_told = True
        return seconds


def words(name: str, kind: str, ranks: Sequence[int] | None, seconds: float) -> str:
    """The line for a job called *name*, a ``call``, one that was ``started``, or a ``pool``; *ranks* are shown."""
    long = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if ranks is None:
        who = "no rank has written anything"
    else:
        who = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} written nothing"
    look = {
        "started": "elasticlib.jobs() lists it: .stacks() tells where all ranks are, .stop() ends it",
        "pool": "an interrupt ends this call; pool.job.stacks(), from a thread, tells where all ranks are",
        "call": "an interrupt ends it; begun with .start(), its job.stacks() tells where all ranks are",
    }[kind]
    return f"[job {name!r} runs, but {who} for {long}: {look}]"
