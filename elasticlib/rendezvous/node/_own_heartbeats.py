"""
A node's own heartbeats, and what the coordinator says of them. Pure.

Rules of this file: a heartbeat that the store acknowledged, and that the coordinator still misses when it should long
have read it, was destroyed in between; this node's own clock tells how long that is.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._messages import CoordinatorHeartbeat

_SEEN_BY = 0.25
"""Share of the heartbeat time in which a heartbeat in the store is read, and the coordinator's says so."""
_UNANSWERED = frozenset(4 * 2**times for times in range(20))
"""Heartbeats without ranks after which the request to join may have been removed from the store."""
_KEPT = 4


@frozen
class OwnHeartbeats:
    """By default, those of a node that has sent none yet."""

    count: int = 0
    unanswered: int = 0
    """Since the last request to join."""
    acknowledged: tuple[tuple[int, float], ...] = ()
    """The last ones that are in the store since then, each with the time when it was sent."""

    def joins(self) -> Self:
        """A new mailbox is opened, in which there is no heartbeat."""
        return evolve(self, unanswered=0, acknowledged=())

    def next(self) -> Self:
        """One more goes out."""
        return evolve(self, count=self.count + 1, unanswered=self.unanswered + 1)

    def acked(self, sent: float) -> Self:
        """The last one, which was sent then, is in the store."""
        return evolve(self, acknowledged=(*self.acknowledged[1 - _KEPT :], (self.count, sent)))

    def is_late(self) -> bool:
        """Whether an answer to the request should long have come, and it is time to say so."""
        return self.unanswered in _UNANSWERED

    def are_destroyed(self, heard: CoordinatorHeartbeat, node: str, heartbeat: float, known: int, asked: float) -> bool:
        """
        Whether *heard*, which was *asked* for then, misses heartbeats of this *node* that are in the store.

        One whose count is not above that of the coordinator's heartbeat *known* before is old, and says nothing.
        """
        if heard.count <= known:
            return False
        last = next((each.count for each in heard.missed if each.node == node), None)
        if last is None or not self.acknowledged:
            return False
        before = asked - _SEEN_BY * heartbeat
        return any(count > last and sent <= before for count, sent in self.acknowledged)
