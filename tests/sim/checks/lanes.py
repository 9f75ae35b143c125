"""
Rules of a node's connections: one at a time, with one operation at a time on each of two lanes.

No operation is requested of a missing connection. An operation that follows from an answer is
requested at once.
"""

from __future__ import annotations

from typing import Any

from attrs import Factory, define

from elasticlib.rendezvous.node._session_events import Ask, ConnectionThread
from tests.sim.checks.demand import Demand


@define(eq=False, repr=False)
class Lanes:
    """The connections of one node, of which the last one counts."""

    demand: Demand
    number: int = 0
    there: bool = False
    ended: bool = False
    """True if the connection was given up, and no other follows."""
    follow: dict[ConnectionThread, Any] = Factory(dict)
    """Operation that each lane must request next, and at once."""
    _asked: dict[ConnectionThread, Ask] = Factory(dict)
    _operations: int = 0

    def begins(self, number: int) -> None:
        """Another one is made."""
        self.demand(number == self.number + 1, f"connection {number} comes after {self.number}")
        self.number = number
        self.breaks()

    def breaks(self) -> None:
        """It is none any more."""
        self.there = False
        self._asked.clear()
        self.follow.clear()

    def ends(self, number: int) -> None:
        """It is given up for good."""
        self.demand(number == self.number, f"connection {number} is given up, and {self.number} is there")
        self.breaks()
        self.ended = True

    def asks(self, ask: Ask) -> Any:
        """An operation is asked for; the one that had to be, if one had."""
        here = ask.connection == self.number and self.there
        self.demand(here, f"{ask.operation} is asked of connection {ask.connection}, which is lost")
        self.demand(self.is_free(ask.thread), f"{ask.operation} is asked of a lane that is busy")
        self.demand(ask.number == self._operations + 1, f"{ask.operation} has number {ask.number} again")
        self._operations, self._asked[ask.thread] = ask.number, ask
        wanted = self.follow.pop(ask.thread, None)
        self.demand(wanted in (None, ask.operation), f"{ask.operation} is asked in the place of {wanted}")
        return wanted

    def answered(self, number: int) -> Ask | None:
        """Remove and return the request with that number, or None if no lane waits for the answer."""
        return next((self._asked.pop(lane) for lane, ask in self._asked.items() if ask.number == number), None)

    def is_free(self, lane: ConnectionThread) -> bool:
        """Return whether the lane can take a request."""
        return lane not in self._asked

    def rests(self) -> None:
        """Nothing more is asked in this step."""
        self.demand(not self.follow, f"{self.follow} must be asked now")
