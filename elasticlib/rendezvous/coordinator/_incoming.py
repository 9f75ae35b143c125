"""
Messages and heartbeats of nodes, checked as the coordinator reads them. Pure.

Rules of this file: data that is unreadable, too long or from another place than it claims is
refused, with a line for people. Of the heartbeats of a mailbox the one with the highest count
holds: a lower one is old, and somebody has written it again. A message that its node saw in the
store was removed if it does not arrive within the heartbeat time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from attrs import Factory, define
from typing_extensions import Self

from elasticlib._untrusted import Refusals
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._codec import Place
from elasticlib.rendezvous.protocol._exchange import heartbeat_key, key_place, report_place
from elasticlib.rendezvous.protocol._messages import Envelope, Message, NodeHeartbeat, decode
from elasticlib.rendezvous.protocol._operations import Log, refuse
from elasticlib.rendezvous.protocol._shortening import ENVELOPE

_Kind = TypeVar("_Kind", NodeHeartbeat, Envelope)


@define
class Incoming:
    """The messages and heartbeats of one job."""

    run_id: str = ""
    key: bytes | None = None
    _refusals: Refusals = Factory(Refusals)
    _latest: dict[str, NodeHeartbeat] = Factory(dict)
    """By mailbox."""
    _hidden: set[str] = Factory(set)
    """Mailboxes where no heartbeat could be read the last time."""
    _said: dict[str, tuple[int, float]] = Factory(dict)
    """
    The number of a message that a node reports and that has not arrived, by node, and since when
    that is known.
    """

    def copy(self) -> Self:
        """Return an independent copy."""
        latest, hidden, said = dict(self._latest), set(self._hidden), dict(self._said)
        return type(self)(self.run_id, self.key, self._refusals, latest, hidden, said)

    def envelope(self, data: bytes, nonce: str, now: float) -> tuple[Envelope | None, tuple[Log, ...]]:
        """Return the message in *data*, if there is one; *nonce* is that of this beginning of the job."""

        # The sender must be known to check the signature against that sender's place.
        def place(message: Message) -> str:
            if not isinstance(message, Envelope):
                raise ValueError(f"a node cannot post a {type(message).__name__}")
            return report_place(self.run_id, nonce, message.report.node, message.seq)

        # Checked before it is parsed: parsing a stranger's megabytes would delay every node.
        if len(data) > ENVELOPE:
            error = f"the inbox holds {len(data):,} bytes, and a message has at most {ENVELOPE:,}"
            return None, self._refuse("report", error, now)

        return self._decode(Envelope, "report", data, place, now)

    def heartbeat(
        self, mailbox: str, data: bytes | None, nonce: str, now: float
    ) -> tuple[NodeHeartbeat | None, tuple[Log, ...]]:
        """Return the heartbeat in *data*, or the known one if that is newer."""
        # Hidden until one can be read: an overwritten heartbeat does not show that its node lives.
        self._hidden.add(mailbox)
        if data is None:
            return None, ()

        place = key_place(self.run_id, nonce, heartbeat_key(mailbox))
        heartbeat, said = self._decode(NodeHeartbeat, "heartbeat", data, place, now)
        if heartbeat is None:
            return None, said

        self._hidden.discard(mailbox)

        # An older one may be the past, written again by a stranger.
        known = self._latest.get(mailbox)
        if known is None or heartbeat.count >= known.count:
            self._latest[mailbox] = heartbeat
        return self._latest[mailbox], said

    def counts(self, mailboxes: Collection[str]) -> dict[str, int]:
        """Return the count of each heartbeat that can be read now; forget those of other mailboxes."""
        self._hidden.intersection_update(mailboxes)
        self._latest = {mailbox: self._latest[mailbox] for mailbox in mailboxes if mailbox in self._latest}
        return {each: heartbeat.count for each, heartbeat in self._latest.items() if each not in self._hidden}

    def removed(self, node: str, said: int, heard: int, now: float, timeout: float) -> int | None:
        """Return the number of a message that was removed from the store unread; None if none was."""
        if said <= heard:
            self._said.pop(node, None)
            return None
        # A message may be on its way: it is missing once the time for that is over.
        number, since = self._said.setdefault(node, (said, now))
        if number <= heard:
            del self._said[node]
            return None
        return number if now > since + timeout else None

    def retain(self, nodes: Collection[str]) -> None:
        """Forget the messages of all other nodes."""
        self._said = {node: it for node, it in self._said.items() if node in nodes}

    def _decode(
        self, kind: type[_Kind], name: str, data: bytes, place: Place, now: float
    ) -> tuple[_Kind | None, tuple[Log, ...]]:
        try:
            message = decode(data, self.key, place)
        except RendezvousStateError as error:
            return None, self._refuse(name, error, now)
        if not isinstance(message, kind):
            return None, self._refuse(name, f"found a {type(message).__name__} instead of a {kind.__name__}", now)
        return message, ()

    def _refuse(self, name: str, why: object, now: float) -> tuple[Log, ...]:
        self._refusals, said = refuse(self._refusals, name, why, now)
        return said
