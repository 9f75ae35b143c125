"""
Whether a restart would only meet the same error again. PURE: failures, seconds and steps in, failures out.

A first failure says nothing about the next attempt. The same exception with the same text at the same line, in two
attempts one after the other, is the program's own, and a third attempt would show nothing new, where

* both attempts failed within a minute of their start, or
* the program reports its `progress`, and the second attempt got no further than the first. A program that reports
  none may have got further: it keeps its restarts.

An error of a peer, of a device or of the system never counts: it may be gone by the next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from elasticlib.errors import ProcessFailure, root_cause

_AT_ONCE = 60.0
"""Seconds from the start of the workers in which an error is one of the program's beginning."""


@frozen
class _Attempt:
    """How the workers failed."""

    error: tuple[str, ...]
    """Type, text and place of the exception."""
    is_early: bool
    step: int | None
    """The furthest step of any worker of this node; None where none reported one."""

    def repeats(self, former: _Attempt) -> bool:
        """True if a third attempt would show nothing new."""
        if self.error != former.error:
            return False
        if self.is_early and former.is_early:
            return True
        return self.step is not None and former.step is not None and self.step <= former.step


class Repeats:
    """The root causes of one attempt after the other."""

    def __init__(self) -> None:
        self._round = -1
        self._began = 0.0
        self._former: _Attempt | None = None
        """The attempt before; None where no error of the program ended it."""
        self._present: _Attempt | None = None

    def begin(self, round: int, when: float) -> None:
        """The workers of *round* start at the Unix time *when*."""
        if round != self._round:
            self._round, self._began = round, when
            self._former, self._present = self._present, None

    def marked(self, failures: Mapping[int, ProcessFailure], step: int | None) -> None:
        """Mark the root cause as fatal where it repeats the attempt before; *step* is the furthest of any worker."""
        if not failures:
            return
        _, failure = root_cause(dict(failures))
        self._present = self._attempt(failure, step)
        if self._present is None or self._former is None:
            return
        if self._present.repeats(self._former):
            failure.fatal = True

    def _attempt(self, failure: ProcessFailure, step: int | None) -> _Attempt | None:
        """Return the attempt that *failure* ended; None where it is no error of the program."""
        # An error of a peer, a device or the system may be gone by the next attempt.
        if not failure.exception_type or failure.secondary or failure.external:
            return None
        place = tuple(f"{frame.file}:{frame.line}" for frame in failure.frames[-1:])
        is_early = failure.when() - self._began <= _AT_ONCE
        return _Attempt((failure.exception_type, failure.message, *place), is_early, step)
