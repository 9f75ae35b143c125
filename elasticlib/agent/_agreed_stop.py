"""
A stop at a step on which all ranks agree: their programs ask for it by `should_stop`.

Rules of this file: time is an argument, in monotonic seconds. The workers' memory is only read and
written through its `StopBoard`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from attrs import define, field

from elasticlib._times import soonest
from elasticlib.workers.child import StopBoard

_TICK = 0.005
"""Seconds between two looks at the workers' counts, until all have come."""
_SHARE, _MOST = 0.2, 5.0
"""Part of the grace, and its maximum in seconds, that is kept for workers that do not return in time."""


@define
class AgreedStop:
    """The stop of the workers of one round, and its course."""

    _board: StopBoard
    grace: float
    """Seconds from `due` to SIGKILL."""
    due: float
    """Time at which workers that still run get the signal."""
    _listeners: frozenset[int] | None = field(init=False, default=None)
    """Local ranks that called `should_stop` before they were asked to stop: they are waited for."""
    _is_counted: bool = field(init=False, default=False)

    @classmethod
    def begin(cls, board: StopBoard, grace: float, now: float) -> AgreedStop:
        """Return the stop of workers that have *grace* seconds from *now* on."""
        kept = min(_MOST, _SHARE * grace)
        return cls(board, kept, now + grace - kept)

    def ask(self, why: str, deadline: float, ranks: range) -> None:
        """Ask the workers to stop until *deadline*, a Unix time, since the global *ranks* must end."""
        self._listeners = frozenset(self._board.listeners())
        self._board.ask(why, deadline, ranks)

    def counted(self, running: Collection[int]) -> int | None:
        """
        Return the most calls of a worker, once all listeners that are *running* have seen the request.

        None before, and after the first time.
        """
        if self._listeners is None or self._is_counted:
            return None
        seen = self._board.seen(self._listeners)
        is_awaited = any(rank in running and rank not in seen for rank in self._listeners)
        if is_awaited:
            return None
        self._is_counted = True
        return max(seen.values(), default=0)

    def agree(self, call: int) -> None:
        """Let the workers stop in this call."""
        self._board.agree(call)

    def falls_due(self, now: float) -> bool:
        """Return True once, when `due` has come."""
        if now < self.due:
            return False
        self.due = math.inf
        return True

    def poll_timeout(self, now: float) -> float | None:
        """Return the seconds until `counted` must be called, or `due` has come; None: neither."""
        left = None if self.due == math.inf else max(0.0, self.due - now)
        is_counting = self._listeners is not None and not self._is_counted
        return soonest(left, _TICK if is_counting else None)

    def were_stopped(self) -> bool:
        """Return True if a worker was given a `Stop`."""
        return bool(self._board.given())
