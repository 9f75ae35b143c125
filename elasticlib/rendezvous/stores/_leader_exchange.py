"""
The connection by which one node writes as a job's coordinator, in a store that anybody can write.

Rules of this file: who coordinates is what a greeting says that is of this job, signed where there is a token. What
bears no signature is written again: a stranger's scribble on it costs a wait, and another coordinator one an end.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT
from elasticlib.rendezvous.protocol._reading import LastHeartbeat, greeting_of
from elasticlib.rendezvous.stores._state_log import LeadershipLost
from elasticlib.rendezvous.stores._torch_store import CLAIMANT, StoreExchange


@define(eq=False)
class LeaderExchange(StoreExchange):
    """As `StoreExchange`; `write` raises `LeadershipLost` once another node coordinates the job."""

    claim: bytes = field(kw_only=True)
    """What stands as the job's `CLAIMANT` while it is this node's."""
    key: bytes | None = field(default=None, kw_only=True)
    hosts: bool = field(default=False, kw_only=True)
    """Whether this node hosts the store: nobody can have begun and ended the job without it."""
    again: Mapping[str, bytes] = field(factory=dict, kw_only=True)
    """What else tells of the coordinator, by its place in the store: written anew with each greeting."""
    _greeted: bytes | None = field(init=False, default=None)
    """Our greeting, once it was written."""
    _rival: LastHeartbeat = field(init=False, factory=LastHeartbeat)
    """Of another coordinator of the job."""

    def write(self, values: Mapping[str, bytes]) -> None:
        """Write all values, wake all who wait for their keys."""
        announcement = values.get(ANNOUNCEMENT)
        if announcement is not None:
            self._look_for_rival()
        self._hold_claim()
        if announcement is not None:
            with self._speaking() as store:
                for key, data in self.again.items():
                    store.set(key, data)  # what is written next is acknowledged after it
        super().write(values)
        self._greeted = announcement or self._greeted

    def _hold_claim(self) -> None:
        [claimant] = self.read([CLAIMANT])
        if claimant == self.claim:
            return
        if not self._may_claim(claimant) or self.replace(CLAIMANT, claimant or b"", self.claim) != self.claim:
            raise LeadershipLost(f"job {self._run_id!r} was counted as dead, and started anew by another node")

    def _may_claim(self, claimant: bytes | None) -> bool:
        """Whether the claim is not there because of a stranger: a node that begins the job anew greets at once."""
        if self._greeted is None:
            return claimant is None
        [announcement] = self.read([ANNOUNCEMENT])
        return announcement == self._greeted or (announcement is None and self.hosts)

    def _look_for_rival(self) -> None:
        """
        An older greeting may be written again by anybody, and the one of a dead coordinator stands there: whoever
        coordinates goes on with its heartbeat. Of two the one that sees that first stops, before it writes again.
        """
        data, heartbeat = self.read([ANNOUNCEMENT, COORDINATOR_HEARTBEAT])
        if data == self._greeted or (announcement := greeting_of(data, self._run_id, self.key)) is None:
            return
        self._rival, lives = self._rival.then(announcement, heartbeat, self.key)
        if lives:
            raise LeadershipLost(f"node {announcement.host} coordinates it as well")
