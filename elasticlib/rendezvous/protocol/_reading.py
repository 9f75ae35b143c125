"""
The greeting and heartbeat that a job's coordinator has left in the store, for any reader. Pure.

Rules of this file: anybody can have written the bytes. With a token, data without its signature
does not count.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT, key_place
from elasticlib.rendezvous.protocol._messages import Announcement, CoordinatorHeartbeat, decode
from elasticlib.rendezvous.protocol._shortening import line


def greeting_of(data: bytes | None, run_id: str, key: bytes | None) -> Announcement | None:
    """Return the greeting of a coordinator of this job; None for any other data."""
    try:
        announcement = decode(data or b"", key, key_place(run_id, "", ANNOUNCEMENT))
    except RendezvousStateError:
        return None
    # Another job's greeting may lie here where two jobs share a store by mistake.
    if not isinstance(announcement, Announcement) or announcement.run_id != run_id:
        return None
    return evolve(announcement, host=line(announcement.host))


def heartbeat_of(
    data: bytes | None, run_id: str, nonce: str, key: bytes | None
) -> tuple[CoordinatorHeartbeat | None, str]:
    """Return the heartbeat of the coordinator with that *nonce*; or None, with the reason."""
    if data is None:
        return None, "the store answers, but it has no heartbeat of the job's coordinator"

    try:
        heartbeat = decode(data, key, key_place(run_id, nonce, COORDINATOR_HEARTBEAT))
    except RendezvousStateError as error:
        return None, f"the heartbeat of the job's coordinator was overwritten: {error}"

    # Another beginning of the job has a heartbeat, too: only a token's signature would distinguish
    # the two.
    if not isinstance(heartbeat, CoordinatorHeartbeat) or heartbeat.nonce != nonce:
        return None, "the heartbeat in the store is not that of this job's coordinator"

    return heartbeat, ""


@frozen
class LastHeartbeat:
    """A coordinator's heartbeat when it was last read; the defaults mean that it was never read."""

    nonce: str = ""
    count: int = -1
    """-1: none was found."""

    def then(self, announcement: Announcement, data: bytes | None, key: bytes | None) -> tuple[Self, bool]:
        """
        Return the heartbeat in *data*, and whether it has grown: then the coordinator that wrote
        *announcement* lives.
        """
        heartbeat, _ = heartbeat_of(data, announcement.run_id, announcement.nonce, key)
        count = -1 if heartbeat is None else heartbeat.count
        now = type(self)(announcement.nonce, count)
        # One heartbeat alone does not show when it was written.
        has_grown = now.nonce == self.nonce and now.count > self.count >= 0
        return now, has_grown
