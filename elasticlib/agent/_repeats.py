"""
Detection of errors that a restart would only repeat. PURE.

A first failure says nothing about the next attempt. Two attempts in a row may end with the same
exception, with the same text, at the same line. A third attempt would then show nothing new if

* both attempts failed within a minute of their start, or
* the program reports its `progress`, and the second attempt got no further than the first. A
  program that reports none may have got further: it keeps its restarts.

An error of a peer, of a device or of the system never counts: it may be gone by the next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from elasticlib.errors import ProcessFailure, root_cause

_AT_ONCE = 60.0
"""Seconds from the start of the workers in which an error counts as early."""


@frozen
class _Attempt:
    """Failure of the workers in one attempt."""

    error: tuple[str, ...]
    """Type, text and place of the exception."""
    is_early: bool
    step: int | None
    """Furthest step of any worker of this node; None if none was reported."""

    def repeats(self, former: _Attempt) -> bool:
        """Return whether a third attempt would show nothing new."""
        if self.error != former.error:
            return False
        if self.is_early and former.is_early:
            return True
        return self.step is not None and former.step is not None and self.step <= former.step


class Repeats:
    """Root causes of the current and the previous attempt."""

    def __init__(self) -> None:
        self._round = -1
        self._began = 0.0
        self._former: _Attempt | None = None
        """Previous attempt; None if no error of the program ended it."""
        self._present: _Attempt | None = None

    def begin(self, round: int, when: float) -> None:
        """Begin the attempt of *round*, whose workers start at the Unix time *when*."""
        if round != self._round:
            self._round, self._began = round, when
            self._former, self._present = self._present, None

    def marked(self, failures: Mapping[int, ProcessFailure], step: int | None) -> None:
        """Mark a root cause that repeats the previous one as fatal; *step* is the furthest step."""
        if not failures:
            return
        _, failure = root_cause(dict(failures))
        self._present = self._attempt(failure, step)
        if self._present is None or self._former is None:
            return
        if self._present.repeats(self._former):
            failure.fatal = True

    def _attempt(self, failure: ProcessFailure, step: int | None) -> _Attempt | None:
        """Return the attempt that *failure* ended; None unless it is an error of the program."""
        # An error of a peer, a device or the system may be gone by the next attempt.
        if not failure.exception_type or failure.secondary or failure.external:
            return None
        place = tuple(f"{frame.file}:{frame.line}" for frame in failure.frames[-1:])
        is_early = failure.when() - self._began <= _AT_ONCE
        return _Attempt((failure.exception_type, failure.message, *place), is_early, step)
