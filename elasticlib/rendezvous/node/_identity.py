"""
The identity of a node and of its job: it makes the node's messages, and checks those of the job. Pure.

Rules of this file: bytes come in, a message goes out. The message is of this job, of its
coordinator and of the place where it was found; otherwise a `RendezvousStateError` names the
reason.
"""

from __future__ import annotations

from attrs import evolve, frozen

from elasticlib._untrusted import parse, shown
from elasticlib.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousNotFoundError,
    RendezvousStateError,
)
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, CAUSE, heartbeat_key, key_place, report_place
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._reading import heartbeat_of
from elasticlib.rendezvous.protocol._shortening import refers

SUSPECTED_FOR = 3.0
"""Seconds for which a foreign greeting may be a stray write; a coordinator renews its own."""
LOOK_AGAIN = 0.1
"""Seconds until a suspected greeting is read again."""
_SAME_TOKEN = (
    "give all nodes the same token (ELASTICLIB_TOKEN), or none (empty); without that variable each user has a token "
    "of their own on loopback endpoints"
)


@frozen
class SuspectedGreeting:
    """A greeting that does not seem to be this job's."""

    since: float
    at: float
    """Time of the last read."""

    @property
    def look_at(self) -> float:
        """Time of the next read."""
        return self.at + LOOK_AGAIN

    def is_over(self) -> bool:
        """Return whether the greeting stayed for too long to be a stray write."""
        return self.at > self.since + SUSPECTED_FOR


def suspected_again(before: SuspectedGreeting | None, now: float) -> SuspectedGreeting:
    """Return the greeting after one more read at *now*."""
    return SuspectedGreeting(now if before is None else before.since, now)


@frozen
class NodeIdentity:
    """The identity of a node's job and coordinator, and of the node itself."""

    run_id: str
    node: str
    key: bytes | None
    nonce: str = ""
    """The coordinator's nonce, once its greeting was read."""
    after: str = ""
    """The end of this node's previous sidecar; empty for the first one."""
    sent: int = 0
    """Upper bound of the sidecar's message numbers."""

    def announcement(self, data: bytes) -> messages.Announcement:
        """
        Return the greeting; raises `RendezvousClosedError` when this node's job was replaced by
        another one.
        """
        try:
            announcement = messages.decode(data, self.key, key_place(self.run_id, "", ANNOUNCEMENT))
        except RendezvousStateError as error:
            raise RendezvousStateError(_why_foreign(data, self.key, error)) from error

        if not isinstance(announcement, messages.Announcement) or announcement.run_id != self.run_id:
            raise RendezvousStateError(f"the store holds {data[:80]!r} instead of the entry of job {self.run_id!r}")

        if self.nonce and announcement.nonce != self.nonce:
            # The job that this node was in is over.
            anew = f"job {self.run_id!r} was restarted on {announcement.host}"
            raise RendezvousClosedError(f"{anew}: this node is no longer part of it")

        return announcement

    def coordinator_heartbeat(self, data: bytes | None) -> tuple[messages.CoordinatorHeartbeat | None, str]:
        """
        Return the coordinator's heartbeat, or None with the reason why *data* cannot be believed.
        """
        return heartbeat_of(data, self.run_id, self.nonce, self.key)

    def notice(self, key: str, data: bytes, last: int = -1) -> messages.CoordinatorNotice:
        """Return the notice at *key*; *last* is the last round in which this node had ranks."""
        message = messages.decode(data, self.key, key_place(self.run_id, self.nonce, key))
        if not isinstance(message, messages.CoordinatorNotice):
            raise RendezvousStateError(
                f"the store key {key} holds a {type(message).__name__}, which a coordinator never sends"
            )
        # Rounds only grow: an old assignment that is shown again must not start workers beside others.
        if isinstance(message, messages.RankAssignment) and message.round <= last:
            raise RendezvousStateError(
                f"the store key {key} holds ranks of round {message.round}, but this node already got those of "
                f"round {last}"
            )
        return message

    def whole(self, final: messages.Final, data: bytes | None) -> messages.Final:
        """
        Return the end with its whole root cause if *data* is that; else with the few lines that it
        came with.
        """
        try:
            found = messages.decode(data or b"", self.key, key_place(self.run_id, self.nonce, CAUSE))
        except RendezvousStateError:
            return final
        if not isinstance(found, messages.Failed) or len(found.failures) != 1:
            return final
        # Only a text that shortens to the very lines of the end: anybody may have written there.
        whole = evolve(final, root_node=found.node, root=found.failures[0])
        return whole if refers(whole) == final else final

    def join(self, descriptor: messages.Descriptor, terms: messages.Terms | None, seen: Seen) -> messages.Join:
        """Return the request for ranks of this node."""
        # Only the sidecar's first request: once it has had ranks, a later request has another
        # reason.
        after = self.after if seen.round < 0 else ""
        return messages.Join(self.node, descriptor, terms, seen.round, seen.epoch, seen.heartbeat_count, after)

    def envelope(self, seq: int, report: messages.Report) -> bytes:
        """Return a report of this node, encoded for the coordinator."""
        place = report_place(self.run_id, self.nonce, self.node, seq)
        return messages.encode(messages.Envelope(seq, report), self.key, place)

    def heartbeat(self, mailbox: str, heartbeat: messages.NodeHeartbeat) -> dict[str, bytes]:
        """Return a heartbeat of this node, by its key."""
        key = heartbeat_key(mailbox)
        return {key: messages.encode(heartbeat, self.key, key_place(self.run_id, self.nonce, key))}

    def gave_up(self, closed: bool, why: str) -> RendezvousNotFoundError | RendezvousConnectionError:
        """Return the error of a node whose part is over; *closed*: the job was there."""
        kind = RendezvousConnectionError if closed else RendezvousNotFoundError
        return kind(f"node {self.node}, job {self.run_id!r}{why}")


def _why_foreign(data: bytes, key: bytes | None, error: RendezvousStateError) -> str:
    """Return the clearest reason why this greeting is not for this node."""
    try:
        body = parse(data)
        version, signed = body.get("v"), body.get("mac") is not None
    except (ValueError, AttributeError):
        return str(error)

    # The version first: how another version signs is unknown here.
    if version != messages.VERSION:
        theirs = f"the job's coordinator speaks version {shown(version)} of the protocol"
        return f"{theirs}, this node version {messages.VERSION}: install the same elasticlib on all nodes"

    if signed and key is None:
        return f"the job runs with a token, and this node has none: {_SAME_TOKEN}"
    if not signed and key is not None:
        return f"this node has a token, and the job runs without one: {_SAME_TOKEN}"
    if signed:
        return f"this node's token is not the job's: {_SAME_TOKEN}"

    return str(error)
