"""
Whether a restart would only meet the same error again. PURE: failures and seconds in, failures out.

A first failure says nothing about the next attempt: files come late, memory is freed, ports are given back. The same
exception at the same place, at once, in two attempts one after the other is the program's own, and a third attempt
would tell nobody anything new. Whoever sits in front of a notebook waits for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticlib.errors import ProcessFailure, root_cause

_AT_ONCE = 60.0
"""Seconds from the start of the workers in which an error is one of the program's beginning."""


class Repeats:
    """The root causes of one attempt after the other."""

    def __init__(self) -> None:
        self._round = -1
        self._began = 0.0
        self._before: tuple[str, ...] = ()
        """What the attempt before failed by; empty where that was no exception, or came late."""
        self._now: tuple[str, ...] = ()

    def begin(self, round: int, when: float) -> None:
        """The workers of *round* start at the Unix time *when*."""
        if round != self._round:
            self._round, self._began = round, when
            self._before, self._now = self._now, ()

    def marked(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Mark as fatal what the attempt before has failed by, too."""
        if not failures:
            return
        _, failure = root_cause(dict(failures))
        late = failure.when() - self._began > _AT_ONCE
        if failure.secondary or not failure.exception_type or late:
            self._now = ()
            return
        place = tuple(f"{frame.file}:{frame.line}" for frame in failure.frames[-1:])
        self._now = (failure.exception_type, failure.message, *place)
        failure.fatal = failure.fatal or self._now == self._before
