"""
Rules of the wake-up of a session: nothing is due before that moment, and the session becomes idle.

A session that is over requests no wake-up.
"""

from __future__ import annotations

from attrs import define

from elasticlib._times import soonest
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_liveness import TimePassed
from tests.sim.checks.demand import SOON, Demand

_MOST_STEPS = 2000
"""At the same moment."""
_FOR_EVER = 1e5
"""Seconds."""


@define(eq=False, repr=False)
class Waking:
    """Of one session."""

    demand: Demand
    _steps: int = 0
    """Taken at the same moment."""
    _stepped_at: float = 0.0

    def stepped(self, now: float) -> None:
        """It took a step."""
        self._steps, self._stepped_at = self._steps + 1 if now == self._stepped_at else 0, now
        self.demand(self._steps < _MOST_STEPS, "it is never at rest")

    def rests(self, session: Session, now: float) -> None:
        """Nothing more is done in this step."""
        over = session.closed or session.final is not None or session.error is not None
        self.demand(not over or session.wake_at() is None, "its part is over, and it wants to be woken")
        wakes = soonest(session.wake_at(), session.speaks_at())
        before = now + _FOR_EVER if wakes is None else wakes - SOON
        if before > now:
            after, actions = session.step(TimePassed(), before)
            same = (after.unread, after.error) == (session.unread, session.error)
            self.demand(not actions and same, f"it wants to be woken at {wakes}, and wants {actions} before")
