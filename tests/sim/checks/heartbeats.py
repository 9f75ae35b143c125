"""
What must hold for a node's heartbeats.

One goes out in each interval of the heartbeat time, no later for anything else that is to be said, and no earlier;
each has the next number, and says what was read and said. Those of a node that is held rest; the coordinator's are
read all the same.
"""

from __future__ import annotations

import math

from attrs import define

from elasticlib.rendezvous.protocol._messages import NodeHeartbeat
from elasticlib.rendezvous.protocol._timing import INTERVAL
from tests.sim.checks.demand import SOON, Demand


@define(eq=False, repr=False)
class Heartbeats:
    """Of one node."""

    demand: Demand
    count: int = 0
    heartbeat: float = 0.0
    held: bool = False
    sent_at: float = 0.0
    """When the last one went out."""
    since_join: int = 0
    """That went out since the last request to join."""
    answered: int = 0
    """Of these, those after which one of the coordinator was read."""
    _due_at: float = -math.inf

    def at_once(self) -> None:
        """The next one is due."""
        self._due_at = -math.inf

    def joins(self) -> None:
        """A seat is asked for."""
        self.since_join = self.answered = 0

    def heartbeats(self, node_heartbeat: NodeHeartbeat, read: int, said: int, now: float) -> None:
        """One goes out."""
        self.demand(not self.held, "a heartbeat goes out though they are to rest")
        self.count, self.since_join, self.sent_at = self.count + 1, self.since_join + 1, now
        right = NodeHeartbeat(self.count, read, said)
        self.demand(node_heartbeat == right, f"it sends {node_heartbeat}, and should {right}")
        self._goes_out(now)

    def listens(self, now: float) -> None:
        """The coordinator's is read in its place."""
        self.demand(self.held, "the coordinator's heartbeat is read without one of the node")
        self._goes_out(now)

    def _goes_out(self, now: float) -> None:
        self.demand(now >= self._due_at - SOON, f"a heartbeat goes out {self._due_at - now:.6f} s too early")
        self._due_at = now + INTERVAL * self.heartbeat

    def rests(self, now: float) -> None:
        """Nothing goes out though it could."""
        self.demand(now < self._due_at, "a heartbeat is due, and does not go out")
