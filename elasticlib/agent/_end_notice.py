"""
Requests to stop this node: signals, requests of the program, and announcements of its end. Pure.

Rules of this file: times are arguments. A scheduler announces an end some time before it.
"""

from __future__ import annotations

import math

from attrs import define, evolve, field

from elasticlib.agent._policy import StopRequested

_SIGTERM = 15
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
class StopRequests:
    """
    Makes requests to stop this node: of signals, of the program, and of announcements of its end.

    An announcement counts for workers that ask whether they should stop. Some may still be starting, so the last
    one that came too early is kept until one asks.
    """

    notice: EndNotice
    _shutdown_timeout: float
    """Seconds from the stop signal to SIGKILL, unless a request has its own time."""
    _kept: StopRequested | None = field(init=False, default=None)
    _due: float = field(init=False, default=math.inf)
    """Monotonic time of the end that the kept announcement is about."""

    def announces_end(self, signum: int) -> bool:
        """Return True if the signal announces the end of this node."""
        return signum in self.notice.signals

    def of_signal(self, signum: int, *, is_polled: bool) -> StopRequested:
        """Return the request of a signal that stops the job; *is_polled*: a worker asks whether it should stop."""
        return StopRequested(signum, is_polled=is_polled, is_notice=self.announces_end(signum))

    def pass_or_keep(self, stop: StopRequested, now: float, *, has_saved: bool) -> list[StopRequested]:
        """Return *stop* if a worker asks, or all have saved; else keep it, as one of the monotonic time *now*."""
        if stop.is_polled or has_saved:
            return [stop]
        self._kept = stop
        self._due = math.inf if stop.grace is None else now + stop.grace
        return []

    def of_announcement(
        self, signum: int, now: float, wall_now: float, *, is_polled: bool, is_handled: bool
    ) -> list[StopRequested]:
        """
        Return the request of a signal that announces the end; none if it is kept for later.

        *is_handled*: workers have the signal, and handle it on their own.
        """
        # Workers ignore or handle the signal itself, so SIGTERM ends those that do not return.
        stop = StopRequested(
            signum,
            grace=self.notice.grace(wall_now, self._shutdown_timeout),
            is_polled=is_polled,
            is_notice=True,
            is_handled=is_handled,
            worker_signum=_SIGTERM,
        )
        return [stop] if is_handled else self.pass_or_keep(stop, now, has_saved=False)

    def release_kept(self, now: float, *, is_polled: bool, has_saved: bool) -> list[StopRequested]:
        """Return the kept request, with the time that is left of it, once a worker asks or all have saved."""
        stop = self._kept
        if stop is None or not (is_polled or has_saved):
            return []

        self._kept = None
        stop = evolve(stop, is_polled=is_polled)
        if stop.grace is None:
            return [stop]
        left = self._due - now
        # The end has not come when it was announced: it leaves as much time as an end without a time.
        return [evolve(stop, grace=left if left > 0 else None)]

    def poll_timeout(self) -> float | None:
        """Return the seconds until `release_kept` must be called again; None if nothing is kept."""
        return None if self._kept is None else _LOOK
