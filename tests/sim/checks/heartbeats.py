"""
Rules of a node's heartbeats.

One is sent in each interval of the heartbeat time: not early, and not late because of other
messages. Each has the next number, and reports how many notices were read and how many messages
were stored. A suspended node sends none, but still reads those of the coordinator.
"""

from __future__ import annotations

import math
import string

from attrs import Factory, define

from elasticlib.rendezvous.protocol._messages import HeartbeatsRead, NodeHeartbeat, RankAssignment
from elasticlib.rendezvous.protocol._timing import INTERVAL
from tests.sim.checks.demand import SOON, Demand

DIGITS = string.ascii_letters + string.digits + "+/"
MODULO, FAR, REMEMBERED = 64 * 64, 64 * 32, 64


@define(eq=False, repr=False)
class Heartbeats:
    """Of one node."""

    demand: Demand
    count: int = 0
    heartbeat: float = 0.0
    suspended: bool = False
    sent_at: float = 0.0
    """When the last one went out."""
    stored_at: float = -math.inf
    """When the last one since the request to join went out that is in the store."""
    since_join: int = 0
    """Number of heartbeats sent since the last request to join."""
    answered: int = 0
    """Of these, those after which one of the coordinator was read."""
    sent: dict[int, float] = Factory(dict)
    """When each of these went out."""
    has_ranks: bool = False
    """True if ranks arrived since the last request to join."""
    _credited: int = 0
    """The last one that the coordinator has read."""
    _due_at: float = -math.inf

    def at_once(self) -> None:
        """The next one is due."""
        self._due_at = -math.inf

    def joins(self) -> None:
        """A seat is asked for."""
        self.since_join = self.answered = 0
        self.sent, self.stored_at, self.has_ranks = {}, -math.inf, False

    def heartbeats(self, node_heartbeat: NodeHeartbeat, read: int, stored: int, now: float) -> None:
        """One goes out."""
        self.demand(not self.suspended, "a heartbeat goes out though they are to rest")
        self.count, self.since_join, self.sent_at = self.count + 1, self.since_join + 1, now
        self.sent[self.count] = now
        while not self.has_ranks and len(self.sent) > REMEMBERED:
            del self.sent[min(self.sent)]
        right = NodeHeartbeat(self.count, read, stored)
        self.demand(node_heartbeat == right, f"it sends {node_heartbeat}, and should {right}")
        self._sends(now)

    def credited(self, reported: HeartbeatsRead | None, ranks: RankAssignment | None) -> float | None:
        """When the last one went out that the coordinator says it has read; it never takes back what it said."""
        if reported is None or ranks is None or reported.round != ranks.round:
            return None
        digits = reported.last[2 * ranks.group_rank :][:2]
        least = max(self._credited, ranks.heartbeat_count, self.count - self.since_join + 1)
        if len(digits) < 2 or not set(digits) <= set(DIGITS) or self.is_far(ranks):
            return None
        number = 64 * DIGITS.index(digits[0]) + DIGITS.index(digits[1])
        alike = next(count for count in range(least, least + MODULO) if count % MODULO == number)
        if alike not in self.sent:
            return None
        self._credited = alike
        return self.sent[alike]

    def is_far(self, ranks: RankAssignment) -> bool:
        """Return whether so many heartbeats were sent since the last one read that reports are ambiguous."""
        return self.count - max(self._credited, ranks.heartbeat_count, self.count - self.since_join + 1) >= FAR

    def listens(self, now: float) -> None:
        """The coordinator's is read without one of the node before."""
        self.demand(self.suspended, "the coordinator's heartbeat is read in the place of one of the node")
        self._sends(now)

    def _sends(self, now: float) -> None:
        self.demand(now >= self._due_at - SOON, f"a heartbeat goes out {self._due_at - now:.6f} s too early")
        self._due_at = now + INTERVAL * self.heartbeat

    def rests(self, now: float) -> None:
        """Nothing goes out though it could."""
        self.demand(now < self._due_at, "a heartbeat is due, and does not go out")
