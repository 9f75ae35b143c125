"""
Keys of nodes that are gone: nobody will read them any more, so the coordinator deletes them. Pure.

A node that lives clears up behind itself: once it reads in a new mailbox, it deletes what is left of the old ones. What
it did not come to, when it is lost, leaves or has read the end, lies in its last mailboxes.

Rules of this file: bookkeeping only; times are the coordinator's seconds. Who has only just gone may still read its
answer: its keys stay for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import Factory, define, frozen
from typing_extensions import Self

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._state import State
from elasticlib.rendezvous.protocol._exchange import heartbeat_key, mailbox_key

_LAST = 2
"""Mailboxes of a node that reads in the last of them, in which something may be left."""
_MOST = 256
"""The latest notices of a mailbox that are deleted: how many it had is told by heartbeats, maybe a stranger's."""


@frozen
class _LastHeartbeat:
    """The last heartbeat of a node in its mailbox; -1: none came."""

    mailbox: str
    count: int

    def follows(self, other: _LastHeartbeat) -> bool:
        """Whether the node lived after the *other* one; each mailbox counts anew."""
        return self.count > (other.count if self.mailbox == other.mailbox else -1)


@define
class Garbage:
    """The mailboxes of each node, oldest first, each with the number of notices that it was given."""

    _mailboxes: dict[str, dict[str, int]] = Factory(dict)
    _gone: dict[str, float] = Factory(dict)
    """Nodes that are gone, and since when."""
    _ends: dict[str, tuple[_LastHeartbeat, float]] = Factory(dict)
    """Nodes that were told the end: their last heartbeat, and since when."""
    _buried: dict[str, _LastHeartbeat] = Factory(dict)
    """Those of them whose heartbeats stopped before they had read it, and the last one."""

    def copy(self) -> Self:
        """The same, to be changed apart."""
        return type(self)(dict(self._mailboxes), dict(self._gone), dict(self._ends), dict(self._buried))

    def opened(self, node: str, mailbox: str, told: int = 0) -> None:
        """The node waits for answers there, of which it was given so many."""
        known = self._mailboxes.get(node, {})
        self._mailboxes[node] = {**known, mailbox: max(told, known.get(mailbox, 0))}
        self._gone.pop(node, None)

    def know(self, mailboxes: Mapping[str, str], outbox: Outbox) -> None:
        """The nodes that live, at the beginning, and their mailboxes."""
        for node, mailbox in mailboxes.items():
            self.opened(node, mailbox, outbox.next_index(mailbox))
        # They may be gone: each is waited for again once a heartbeat of it is read.
        for node, mailbox in outbox.unsure().items():
            self._buried[node] = _LastHeartbeat(mailbox, -1)

    def has_read(self, node: str, mailbox: str) -> None:
        """The node reads there: it has cleared up, or is about to, what lay in mailboxes before the last one."""
        known = self._mailboxes.get(node, {})
        if len(known) > _LAST and next(reversed(known)) == mailbox:
            self._mailboxes[node] = dict(list(known.items())[-_LAST:])

    def sweep(self, here: Collection[str], now: float, timeout: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Keys of nodes that have been gone, who are not *here*, for *timeout* seconds; and these nodes."""
        for node in self._mailboxes:
            if node in here:
                self._gone.pop(node, None)
            else:
                self._gone.setdefault(node, now)
        nodes = tuple(node for node, since in self._gone.items() if now >= since + timeout)
        keys: list[str] = []
        for node in nodes:
            del self._gone[node]
            for mailbox, told in self._mailboxes.pop(node, {}).items():
                # One more than it was told: where it was woken up from its wait.
                first = max(0, told - _MOST)
                keys += (heartbeat_key(mailbox), *(mailbox_key(mailbox, index) for index in range(first, told + 1)))
        return tuple(keys), nodes

    def bury(self, outbox: Outbox, counts: Mapping[str, int], now: float, timeout: float) -> None:
        """Wait no more for nodes that were told the end, and whose heartbeats have stopped since."""
        for node in list(outbox.unparted):
            mailbox = outbox.mailbox_of(node)
            heartbeat = _LastHeartbeat(mailbox, counts.get(mailbox, -1))
            if node not in self._ends:
                self._ends[node] = heartbeat, now
                continue
            last, since = self._ends[node]
            if heartbeat.follows(last):
                self._ends[node] = heartbeat, now
            elif now >= since + timeout:
                outbox.part(node)
                self._buried[node] = last
        # Nodes that have read the end are waited for no more, either.
        for node in self._ends.keys() - outbox.unparted:
            del self._ends[node]

    def expect(self, outbox: Outbox, node: str, mailbox: str) -> None:
        """The node has written that it waits there: it is back once it sends a heartbeat, or else given up again."""
        outbox.expect(node, mailbox)
        self._buried[node] = _LastHeartbeat(mailbox, -1)

    def awaited(self, outbox: Outbox) -> Mapping[str, str]:
        """Nodes that have not read the end, and where their heartbeats are if they live: the last mailbox of each."""
        buried = {node: heartbeat.mailbox for node, heartbeat in self._buried.items()}
        return {**buried, **{node: outbox.mailbox_of(node) for node in outbox.unparted}}

    def has_come_back(self, node: str, mailbox: str, count: int) -> bool:
        """Return whether a node that was given up before it read the end sends heartbeats; wait for it again."""
        last = self._buried.get(node)
        if last is None:
            return False
        is_alive = _LastHeartbeat(mailbox, count).follows(last)
        if is_alive:
            del self._buried[node]
        return is_alive

    def clear_up(self, outbox: Outbox, watched: Collection[str], state: State, now: float) -> tuple[str, ...]:
        """Those who are gone get no notices any more; and the keys that are to be deleted for them."""
        here = outbox.unparted.union(watched)
        keys, gone = self.sweep(here, now, state.rules.heartbeat)
        for node in gone:
            outbox.give_up(node)
        # As long as it is known to the job, what it was told must not be numbered anew.
        outbox.retain(here.union(state.waiting, () if state.round is None else state.round.entries))
        return keys

    def plain(self, here: Collection[str]) -> dict[str, Any]:
        """As a JSON object, for whoever takes over: those who are gone; the mailboxes of who is *here* are known."""
        return {node: mailboxes for node, mailboxes in self._mailboxes.items() if node not in here}

    @classmethod
    def from_plain(cls, body: Mapping[str, Mapping[str, Any]], now: float) -> Self:
        """What `plain` made; ValueError for a number that counts nothing."""
        mailboxes = {
            str(node): {str(mailbox): _untrusted.whole(told, 0) for mailbox, told in its.items()}
            for node, its in body.items()
        }
        return cls(mailboxes, dict.fromkeys(mailboxes, now))
