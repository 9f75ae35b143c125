"""
A stop at a step on which all ranks agree: their programs ask for it by `should_stop`.

Rules of this file: time is an argument, in monotonic seconds. The workers' memory is only read and
written through its `StopBoard`.
"""

from __future__ import annotations

import math

from attrs import define, field

from elasticlib.workers.child import StopBoard

_SAMPLE = 0.02
"""Seconds over which the workers' calls are counted, to know how fast they are."""
_VISIBLE = 0.002
"""Seconds after which a processor shows a worker's last call, and the worker the proposal."""
_SHARE, _MOST = 0.2, 5.0
"""Part of the grace, and its maximum in seconds, that is kept for workers that do not return in time."""


def _parts(grace: float, now: float) -> tuple[float, float]:
    """Return (the seconds kept for workers that do not return in time, the time at which these begin)."""
    kept = min(_MOST, _SHARE * grace)
    return kept, now + grace - kept


@define
class AgreedStop:
    """The stop of the workers of one round, and its course."""

    _board: StopBoard
    grace: float
    """Seconds from `due` to SIGKILL."""
    due: float
    """Time at which workers that do not ask get the signal, if they still run."""
    _end: float
    """Time at which all workers are killed."""
    is_requested: bool = field(init=False, default=False)
    """True once the workers that ask know of it; before, only handlers of a notice may return."""
    _count_at: float = field(init=False, default=math.inf)
    """Time of the next count of the workers' calls."""
    _first: int = field(init=False, default=0)
    """Calls of the fastest worker at the time of the request."""
    _proposed: int = field(init=False, default=0)

    @classmethod
    def begin(cls, board: StopBoard, grace: float, now: float) -> AgreedStop:
        """Return the stop of workers that have *grace* seconds from *now* on."""
        return cls(board, *_parts(grace, now), now + grace)

    def shorten(self, grace: float, now: float) -> None:
        """Leave the workers *grace* seconds from *now* on, if they have more."""
        kept, due = _parts(grace, now)
        # Once it has been due, the signal was sent.
        if due < self.due < math.inf:
            self.grace, self.due, self._end = kept, due, now + grace

    def ask(self, why: str, deadline: float, ranks: range, now: float) -> None:
        """Begin to count the calls of workers that must stop until *deadline*, a Unix time; *ranks* are global."""
        self._board.ask(why, deadline, ranks)
        self.is_requested = True
        self._first, self._count_at = self._board.calls(), now + _SAMPLE

    def propose(self, call: int, now: float) -> None:
        """Let the workers wait in this call."""
        self._board.propose(call)
        self._proposed, self._count_at = call, now + _VISIBLE

    def agree(self, now: float) -> None:
        """Let the workers return in the proposed call, unless it is too late for any of them."""
        if now < self._end:
            self._board.confirm()

    def counted(self, now: float) -> tuple[int, float, int] | None:
        """
        Return (calls of the fastest worker, its calls per second, the proposal that all know) after a request.

        None before the count, and after it.
        """
        if now < self._count_at:
            return None
        self._count_at = math.inf
        calls = self._board.calls(self._proposed)
        rate = 0.0 if self._proposed else (calls - self._first) / _SAMPLE
        return calls, max(rate, 0.0), self._proposed

    def falls_due(self, now: float) -> bool:
        """Return True once, when `due` has come: the others get the signal, and those that ask may save on."""
        if now < self.due:
            return False
        if self.is_requested:
            self._board.spare()
        self.due = math.inf
        return True

    def poll_timeout(self, now: float) -> float | None:
        """Return the seconds until `counted` must be called, or `due` has come; None: neither."""
        soon = min(self.due, self._count_at)
        return None if soon == math.inf else max(0.0, soon - now)

    def were_stopped(self) -> bool:
        """Return True if a worker was given a `Stop`."""
        return bool(self._board.given())
