"""
Messages and heartbeats of nodes: when the coordinator looks at the heartbeats, and the checks of all
that it reads. Pure.

Rules of this file: data that is unreadable, too long or from another place than it claims is
refused, with a line for people. Of the heartbeats of a mailbox the one with the highest count
holds: a lower one is old, and somebody has written it again. A message that its node saw in the
store was removed if it does not arrive within the heartbeat time. Times are this node's monotonic
seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from attrs import Factory, define, evolve, frozen
from typing_extensions import Self

from elasticlib._untrusted import Refusals
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._codec import Place
from elasticlib.rendezvous.protocol._exchange import heartbeat_key, key_place, report_place
from elasticlib.rendezvous.protocol._messages import Envelope, Message, NodeHeartbeat, decode
from elasticlib.rendezvous.protocol._operations import Log, refuse
from elasticlib.rendezvous.protocol._shortening import ENVELOPE
from elasticlib.rendezvous.protocol._timing import INTERVAL, LOOK, TICK

_SHORTEST_LOOK = 0.01
"""Seconds between two looks, at least."""
_Kind = TypeVar("_Kind", NodeHeartbeat, Envelope)


@frozen
class HeartbeatLooks:
    """
    The coordinator's looks at the heartbeats of nodes, in one term of office: the time of the next
    one, and the time served.
    """

    interval: float = 0.0
    """Seconds between two heartbeats of a node; 0: there are none."""
    reads: tuple[tuple[str, str], ...] = ()
    """The nodes and their mailboxes whose heartbeats are being read."""
    due_at: float = 0.0
    """Time of the next look."""
    _last: float = 0.0
    """Time of the last one."""
    _served: float = 0.0
    """
    Seconds of this term in which it looked around; each time in which it did not counts as one
    `TICK`.
    """

    @classmethod
    def begin(cls, heartbeat: float, now: float) -> Self:
        """Return the looks of a term that begins; *heartbeat* is the heartbeat time in seconds."""
        return cls(heartbeat * INTERVAL, due_at=now, last=now)

    @property
    def has_heartbeats(self) -> bool:
        """True if the nodes of this job send heartbeats."""
        return self.interval > 0

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next look."""
        return self.has_heartbeats and now >= self.due_at

    def next_at(self) -> float | None:
        """Return the time of the next look; None without heartbeats."""
        return self.due_at if self.has_heartbeats else None

    def at(self, here: Mapping[str, str], lost: Mapping[str, str]) -> Self:
        """Begin a look at the mailboxes of the nodes that are *here*, and of the *lost* ones."""
        others = ((node, mailbox) for node, mailbox in lost.items() if node not in here)
        return evolve(self, reads=(*here.items(), *others))

    def done(self, now: float, heartbeat: float, loss: float | None) -> Self:
        """Plan the next look after one at *now*; *loss* is the time at which a silent node is lost."""
        passed = now - self._last
        # Looks are LOOK apart: after half the heartbeat time this process stood still, and heard nobody.
        served = self._served + (passed if passed <= heartbeat / 2 else TICK * heartbeat)

        # Soon after the next loss can be seen. A node that joins later is also lost later.
        due_at = now + heartbeat * LOOK
        if loss is not None:
            due_at = min(due_at, max(loss, now + _SHORTEST_LOOK))
        return evolve(self, due_at=due_at, last=now, served=served)

    def count(self, heartbeat: float) -> int:
        """
        Return the count of the coordinator's next heartbeat within its term.

        It counts the time served, so that two heartbeats show the time between them, however many
        there are.
        """
        return 1 + int(self._served / (heartbeat * TICK)) if heartbeat else 1


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
    _missing: dict[str, tuple[int, float]] = Factory(dict)
    """
    The number of a message that a node has seen in the store and that has not arrived, by node, and
    since when that is known.
    """

    def copy(self) -> Self:
        """Return an independent copy."""
        latest, hidden, missing = dict(self._latest), set(self._hidden), dict(self._missing)
        return type(self)(self.run_id, self.key, self._refusals, latest, hidden, missing)

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
        heartbeat, log = self._decode(NodeHeartbeat, "heartbeat", data, place, now)
        if heartbeat is None:
            return None, log

        self._hidden.discard(mailbox)

        # An older one may be the past, written again by a stranger.
        known = self._latest.get(mailbox)
        if known is None or heartbeat.count >= known.count:
            self._latest[mailbox] = heartbeat
        return self._latest[mailbox], log

    def counts(self, mailboxes: Collection[str]) -> dict[str, int]:
        """Return the count of each heartbeat that can be read now; forget those of other mailboxes."""
        self._hidden.intersection_update(mailboxes)
        self._latest = {mailbox: self._latest[mailbox] for mailbox in mailboxes if mailbox in self._latest}
        return {each: heartbeat.count for each, heartbeat in self._latest.items() if each not in self._hidden}

    def removed(self, node: str, posted: int, received: int, now: float, timeout: float) -> int | None:
        """
        Return the number of a message that was removed from the store unread; None if none was.

        *posted*: the last message that the node saw in the store; *received*: the last one that arrived.
        """
        if posted <= received:
            self._missing.pop(node, None)
            return None

        # A message may be on its way: it is missing once the time for that is over.
        number, since = self._missing.setdefault(node, (posted, now))
        if number <= received:
            del self._missing[node]
            return None

        return number if now > since + timeout else None

    def retain(self, nodes: Collection[str]) -> None:
        """Forget the messages of all other nodes."""
        self._missing = {node: it for node, it in self._missing.items() if node in nodes}

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
        self._refusals, log = refuse(self._refusals, name, why, now)
        return log
