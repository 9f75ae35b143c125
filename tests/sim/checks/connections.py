"""
Rules of a node's connections: one at a time, with one operation at a time on each of two threads.

No operation is requested of a missing connection. An operation that follows from an answer is
requested at once.
"""

from __future__ import annotations

from typing import Any

from attrs import Factory, define

from elasticlib.rendezvous.node._session_events import Ask, ConnectionThread
from tests.sim.checks.demand import Demand


@define(eq=False, repr=False)
class Connections:
    """The connections of one node, of which the last one counts."""

    demand: Demand
    number: int = 0
    there: bool = False
    ended: bool = False
    """True if the connection was given up, and no other follows."""
    follow: dict[ConnectionThread, Any] = Factory(dict)
    """Operation that each thread must request next, and at once."""
    _requested: dict[ConnectionThread, Ask] = Factory(dict)
    _operations: int = 0

    def begins(self, number: int) -> None:
        """Another one is made."""
        self.demand(number == self.number + 1, f"connection {number} comes after {self.number}")
        self.number = number
        self.breaks()

    def breaks(self) -> None:
        """It is none any more."""
        self.there = False
        self._requested.clear()
        self.follow.clear()

    def ends(self, number: int) -> None:
        """It is given up for good."""
        self.demand(number == self.number, f"connection {number} is given up, and {self.number} is there")
        self.breaks()
        self.ended = True

    def requests(self, request: Ask) -> Any:
        """An operation is asked for; the one that had to be, if one had."""
        here = request.connection == self.number and self.there
        self.demand(here, f"{request.operation} is asked of connection {request.connection}, which is lost")
        self.demand(self.is_free(request.thread), f"{request.operation} is asked of a thread that is busy")
        self.demand(request.number == self._operations + 1, f"{request.operation} has number {request.number} again")
        self._operations, self._requested[request.thread] = request.number, request
        wanted = self.follow.pop(request.thread, None)
        self.demand(wanted in (None, request.operation), f"{request.operation} is asked in the place of {wanted}")
        return wanted

    def answered(self, number: int) -> Ask | None:
        """Remove and return the request with that number, or None if no thread waits for the answer."""
        return next(
            (self._requested.pop(thread) for thread, request in self._requested.items() if request.number == number),
            None,
        )

    def is_free(self, thread: ConnectionThread) -> bool:
        """Return whether the thread can take a request."""
        return thread not in self._requested

    def rests(self) -> None:
        """Nothing more is asked in this step."""
        self.demand(not self.follow, f"{self.follow} must be asked now")
