"""
A node's own heartbeats: the time of the next one, and those that the coordinator has read. Pure.

Rules of this file: times are this node's monotonic seconds. While the heartbeats are paused, the
node still reads the coordinator's. The coordinator reports the number of the last heartbeat that it
has read; this node's own clock measures how long ago that one was sent.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._heartbeats_read import REPORT_MODULO, HeartbeatsRead
from elasticlib.rendezvous.protocol._messages import RankAssignment
from elasticlib.rendezvous.protocol._timing import INTERVAL

_UNANSWERED = frozenset(6 * 2**times for times in range(20))
"""Heartbeats without ranks after which the request to join may have been removed from the store."""
_FAR = REPORT_MODULO // 2
"""
Heartbeats after one that was read from which reports are ignored: they might mean an older
heartbeat.
"""
_KEPT = 64
"""Heartbeats of a node without ranks whose sending is remembered."""


@frozen
class OwnHeartbeats:
    """Heartbeats of one node; the defaults are those of a node that has sent none yet."""

    count: int = 0
    is_suspended: bool = False
    """True while they are paused."""
    due_at: float = 0.0
    """Time of the next `turn`."""
    ranks: RankAssignment | None = None
    """The latest rank assignment since the last request to join."""
    unanswered: int = 0
    """Heartbeats since the last request to join."""
    stored: float = -math.inf
    """Time at which the last heartbeat that is in the store was sent."""
    answered: int = 0
    """Number of heartbeats after which the coordinator's was read."""
    _known: int = 1
    """The last heartbeat that was read has this number or a higher one."""
    _sent: tuple[tuple[int, float], ...] = ()
    """The latest heartbeats, each with the time when it was sent."""

    # The time of the next one.

    def suspended(self, is_suspended: bool, now: float) -> Self:
        """Pause the heartbeats, or resume them at once."""
        # The others may be about to count this node as lost.
        return evolve(self, is_suspended=is_suspended, due_at=self.due_at if is_suspended else now)

    def turn(self, now: float, heartbeat: float) -> tuple[Self, bool]:
        """
        Plan the next turn; return True if a heartbeat is sent now, False if the coordinator's is
        only read.

        *heartbeat* is the heartbeat time in seconds.
        """
        after = evolve(self, due_at=now + INTERVAL * heartbeat)
        # The coordinator's heartbeat is still read: the workers' time counts from its contents.
        if self.is_suspended:
            return after, False
        sent = (*self._sent[1 - (_KEPT if self.ranks is None else _FAR) :], (self.count + 1, now))
        return evolve(after, count=self.count + 1, unanswered=self.unanswered + 1, sent=sent), True

    def is_late(self) -> bool:
        """Return whether the answer to the request to join is overdue, and it is time to say so."""
        return self.unanswered in _UNANSWERED

    # The ones that were read.

    def joins(self) -> Self:
        """Start over for a new mailbox, which has no heartbeat yet."""
        first = self.count + 1
        return evolve(self, ranks=None, unanswered=0, stored=-math.inf, answered=0, known=first, sent=())

    def assigned(self, ranks: RankAssignment, join_sent: float | None) -> tuple[Self, float]:
        """
        Take *ranks*; return the earliest time at which the message was sent by which the
        coordinator knew this node.

        The time is minus infinity if so many heartbeats were sent since that it is unknown.
        """
        # The request itself counts where no heartbeat was read yet.
        after = evolve(self, ranks=ranks, known=max(self._known, ranks.heartbeat_count))
        known = dict(self._sent).get(ranks.heartbeat_count, join_sent)
        return after, -math.inf if known is None or after._is_far() else known

    def _is_far(self) -> bool:
        # Only a remainder of a number is reported: so far ahead it could mean an older heartbeat.
        return self.count - self._known >= _FAR

    def hears(self, report: HeartbeatsRead | None, *, answered: bool) -> tuple[Self, float | None]:
        """
        Take the coordinator's *report*; return the time at which the last heartbeat it has read
        was sent, or None if the report does not show it.

        *answered*: the report was requested after one of these heartbeats.
        """
        if answered:
            self = evolve(self, answered=self.answered + 1)
        if report is None or self.ranks is None or report.round != self.ranks.round or self._is_far():
            return self, None
        count = report.count(self.ranks.group_rank, self._known)
        sent = dict(self._sent).get(count)
        if sent is None:
            return self, None
        return evolve(self, known=count, sent=tuple(each for each in self._sent if each[0] >= count)), sent
