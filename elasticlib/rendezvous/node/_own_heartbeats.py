"""
A node's own heartbeats: when the next one goes out, and which of them the coordinator has read. Pure.

Rules of this file: times are this node's monotonic seconds. While the heartbeats rest the coordinator is listened to in
their place. It tells by number which heartbeat it has read last; this node's own clock tells how long
ago that one was sent.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._heartbeats_read import TOLD_MODULO, HeartbeatsRead
from elasticlib.rendezvous.protocol._messages import RankAssignment
from elasticlib.rendezvous.protocol._timing import INTERVAL

_UNANSWERED = frozenset(6 * 2**times for times in range(20))
"""Heartbeats without ranks after which the request to join may have been removed from the store."""
_FAR = TOLD_MODULO // 2
"""So many heartbeats after one that was read, what is told of a later one is not heard: it might mean an older one."""
_KEPT = 64
"""Heartbeats of a node without ranks whose sending is remembered."""


@frozen
class OwnHeartbeats:
    """By default, those of a node that has sent none yet."""

    count: int = 0
    held: bool = False
    """Whether they rest."""
    due_at: float = 0.0
    """When it is time for `turn`."""
    ranks: RankAssignment | None = None
    """The latest, since the last request to join."""
    unanswered: int = 0
    """Heartbeats since the last request to join."""
    stored: float = -math.inf
    """When the last one of these was sent that is in the store."""
    answered: int = 0
    """Of these, those after which the coordinator's was read."""
    _known: int = 1
    """None of a lower number is the last that was read."""
    _sent: tuple[tuple[int, float], ...] = ()
    """The last ones of these, each with the time when it was sent."""

    # When.

    def hold(self, held: bool, now: float) -> Self:
        """They are to rest, or to go on at once."""
        # At once where they go on: the others may be about to count this node as lost.
        return evolve(self, held=held, due_at=self.due_at if held else now)

    def turn(self, now: float, heartbeat: float) -> tuple[Self, bool]:
        """It is time: whether one goes out, or the coordinator is listened to; *heartbeat* is the heartbeat time."""
        after = evolve(self, due_at=now + INTERVAL * heartbeat)
        # The coordinator's heartbeat is still read: the workers' time counts from what it says.
        if self.held:
            return after, False
        sent = (*self._sent[1 - (_KEPT if self.ranks is None else _FAR) :], (self.count + 1, now))
        return evolve(after, count=self.count + 1, unanswered=self.unanswered + 1, sent=sent), True

    def is_late(self) -> bool:
        """Whether an answer to the request to join should long have come, and it is time to say so."""
        return self.unanswered in _UNANSWERED

    # Which was read.

    def joins(self) -> Self:
        """A new mailbox is opened, in which there is no heartbeat."""
        first = self.count + 1
        return evolve(self, ranks=None, unanswered=0, stored=-math.inf, answered=0, known=first, sent=())

    def assigned(self, ranks: RankAssignment, join_sent: float | None) -> tuple[Self, float]:
        """
        With these *ranks*, and when that was sent by which the coordinator knew of this node, at the earliest.

        Infinitely long ago where that was so many heartbeats ago that it is not known.
        """
        # The request itself counts where no heartbeat was read yet.
        after = evolve(self, ranks=ranks, known=max(self._known, ranks.heard))
        known = dict(self._sent).get(ranks.heard, join_sent)
        return after, -math.inf if known is None or after._is_far() else known

    def _is_far(self) -> bool:
        # Only a remainder of a number is told: so far ahead it could mean an older heartbeat.
        return self.count - self._known >= _FAR

    def hears(self, told: HeartbeatsRead | None, *, answered: bool) -> tuple[Self, float | None]:
        """
        After what the coordinator has *told*, and when the last one was sent that was read, where it tells that.

        *answered*: that was asked for after one of these.
        """
        if answered:
            self = evolve(self, answered=self.answered + 1)
        if told is None or self.ranks is None or told.round != self.ranks.round or self._is_far():
            return self, None
        count = told.count(self.ranks.group_rank, self._known)
        sent = dict(self._sent).get(count)
        if sent is None:
            return self, None
        return evolve(self, known=count, sent=tuple(each for each in self._sent if each[0] >= count)), sent
