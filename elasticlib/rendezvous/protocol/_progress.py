"""
A node's latest knowledge of its job, by which it detects a coordinator whose memory was set back.
Pure.

Rules of this file: the values only grow, until the job begins again.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._messages import CoordinatorHeartbeat, CoordinatorNotice, RankAssignment


@frozen
class Seen:
    """
    Progress of a job as one node knows it; the defaults are those of a node that knows nothing yet.
    """

    nonce: str = ""
    """Identifies the beginning of the job in question."""
    epoch: int = 0
    """Number of takeovers of the coordination."""
    round: int = -1
    """The last round in which the node had ranks."""
    heartbeat_count: int = 0
    """Count of the coordinator's latest heartbeat."""

    def after_greeting(self, nonce: str, heartbeat: CoordinatorHeartbeat | None) -> Self:
        """Return the progress after a greeting with this *nonce*, and the heartbeat beside it."""
        if heartbeat is None:
            return evolve(self, nonce=nonce)
        # Without its epoch: a new coordinator is noticed where its consequences are handled.
        return evolve(self, nonce=nonce, heartbeat_count=max(self.heartbeat_count, heartbeat.count))

    def after_heartbeat(self, heartbeat: CoordinatorHeartbeat) -> Self:
        """Return the progress after a heartbeat of the coordinator."""
        return evolve(
            self, epoch=max(self.epoch, heartbeat.epoch), heartbeat_count=max(self.heartbeat_count, heartbeat.count)
        )

    def after_notice(self, notice: CoordinatorNotice) -> Self:
        """Return the progress after a notice of the coordinator."""
        # Only ranks show that a round began: a coordinator that does not know the round has an old
        # memory.
        if isinstance(notice, RankAssignment):
            return evolve(self, round=notice.round)
        return self

    def beyond(self, epoch: int, round: int) -> str:
        """Return, for people, what a coordinator with that memory has forgotten; empty: nothing."""
        if self.round > round:
            known = f"round {round} as the last" if round >= 0 else "none"
            return f"round {self.round}, but the saved state has {known}"
        if self.epoch > epoch:
            return f"its term {self.epoch}, but the saved state has term {epoch} as the last"
        return ""
