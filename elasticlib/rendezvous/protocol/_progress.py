"""
How far a node knows its job to have come: by that it notices a coordinator whose memory was set back. Pure.

Rules of this file: what was seen only grows, as long as the job does not begin anew.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._messages import CoordinatorHeartbeat, RankAssignment, Told


@frozen
class Seen:
    """By default, that of a node which knows nothing yet."""

    nonce: str = ""
    """Of the beginning of the job that it speaks of."""
    epoch: int = 0
    """How often the coordination had been taken over."""
    round: int = -1
    """The last round in which the node had ranks."""
    heard: int = 0
    """Count of the coordinator's latest heartbeat."""

    def greeted(self, nonce: str, heard: CoordinatorHeartbeat | None) -> Self:
        """With the job that this is, and the coordinator's heartbeat that lay beside the greeting."""
        if heard is None:
            return evolve(self, nonce=nonce)
        # Not its epoch: that of a new coordinator is noticed where all follows that must.
        return evolve(self, nonce=nonce, heard=max(self.heard, heard.count))

    def felt(self, heard: CoordinatorHeartbeat) -> Self:
        """After a heartbeat of the coordinator."""
        return evolve(self, epoch=max(self.epoch, heard.epoch), heard=max(self.heard, heard.count))

    def told(self, notice: Told) -> Self:
        """After a notice of the coordinator."""
        # Only ranks say that a round began: a coordinator that knows of no such round has an old memory.
        if isinstance(notice, RankAssignment):
            return evolve(self, round=notice.round)
        return self

    def beyond(self, epoch: int, round: int) -> str:
        """Return what a coordinator that remembers no more than that has forgotten, for people; empty: nothing."""
        if self.round > round:
            known = f"round {round} as the last" if round >= 0 else "none"
            return f"round {self.round}, but the saved state has {known}"
        if self.epoch > epoch:
            return f"its term {self.epoch}, but the saved state has term {epoch} as the last"
        return ""
