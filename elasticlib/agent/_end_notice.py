"""
Announcements of this node's end: signals, the time that they leave, and those that workers learn of later. Pure.

Rules of this file: times are arguments. A scheduler announces an end some time before it.
"""

from __future__ import annotations

import math

from attrs import define, evolve, field

from elasticlib.agent._policy import StopRequested

_LONGEST = 3600.0
"""Seconds; a person, and no scheduler, sends the signal earlier than this before the end of the job."""
_LOOK = 0.1
"""Seconds between two looks for workers that ask whether they should stop."""


@define
class EndNotice:
    """The notices that a node gets of its own end; a watch of the scheduler may change the time."""

    signals: frozenset[int] = frozenset()
    """Signals that announce it."""
    end_time: float = math.inf
    """Unix time of the end; inf if unknown."""

    def grace(self, now: float, least: float) -> float | None:
        """Return the seconds that a signal at *now* leaves if they are more than *least*; None for *least*."""
        left = self.end_time - now
        return left if least < left <= _LONGEST else None


@define
class UnheardNotice:
    """The last announcement that came while no worker asked whether it should stop: some may still be starting."""

    _request: StopRequested | None = field(init=False, default=None)
    _due: float = field(init=False, default=math.inf)
    """Monotonic time of the announced end."""

    def keep(self, request: StopRequested, now: float) -> None:
        """Keep *request* for workers that ask later."""
        self._request = request
        self._due = math.inf if request.grace is None else now + request.grace

    def take(self, now: float) -> StopRequested | None:
        """Return the kept request, with the time that is left of it, and forget it; None without one."""
        request, self._request = self._request, None
        if request is None or request.grace is None:
            return request
        left = self._due - now
        # The end has not come when it was announced: it leaves as much time as an end without a time.
        return evolve(request, grace=left if left > 0 else None)

    def poll_timeout(self) -> float | None:
        """Return the seconds until the workers must be looked at again; None without a request."""
        return None if self._request is None else _LOOK
