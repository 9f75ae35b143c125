"""
What the coordinator says to whoever comes: which job this is, and that it lives. Pure.

Rules of this file: data only, and what they look like in the store; when they are written is the server's business.
"""

from __future__ import annotations

from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT, key_place
from elasticlib.rendezvous.protocol._messages import (
    EPOCH_BITS,
    Announcement,
    CoordinatorHeartbeat,
    Missed,
    Terms,
    encode,
)
from elasticlib.rendezvous.protocol._timing import TICK


def announcement(run_id: str, nonce: str, name: str, rules: Rules, *, signed: bool) -> Announcement:
    """The greeting of the node *name*, which coordinates."""
    terms = Terms(rules.min_nodes, rules.max_nodes, rules.max_restarts)
    return Announcement(run_id, nonce, name, terms, rules.heartbeat, signed)


def signed(announcement: Announcement, heartbeat: CoordinatorHeartbeat, key: bytes | None) -> dict[str, bytes]:
    """Both, as they are written."""
    place = key_place(announcement.run_id, announcement.nonce, COORDINATOR_HEARTBEAT)
    return {
        ANNOUNCEMENT: encode(announcement, key, key_place(announcement.run_id, "", ANNOUNCEMENT)),
        COORDINATOR_HEARTBEAT: encode(heartbeat, key, place),
    }


def number(last: int, served: float, heartbeat: float) -> int:
    """Of the coordinator's next heartbeat: the ticks of *served* seconds, so that two of them tell the time between."""
    return max(last + 1, int(served / (heartbeat * TICK)) if heartbeat else 0)


def count(epoch: int, number: int) -> int:
    """Of heartbeat *number* of that epoch: above all of the epochs before."""
    return (epoch << EPOCH_BITS) + number


def heartbeat(
    nonce: str, epoch: int, number: int, status: str, remark: str, waiting: int, over: str, missed: tuple[Missed, ...]
) -> CoordinatorHeartbeat:
    """Pulse *number* of that epoch; a successor's count must be above ours, whatever it is."""
    told = f"{status}; {remark}" if status and remark else status
    return CoordinatorHeartbeat(nonce, count(epoch, number), told, waiting, over, missed)
