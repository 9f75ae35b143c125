"""
Keys of nodes that are gone: nobody will read them any more, so the coordinator deletes them. Pure.

A node that lives clears up its own keys: once it reads in a new mailbox, it deletes the rest of the
old ones. The keys that it had not deleted when it was lost, left or read the end are in its last
mailboxes.

Rules of this file: bookkeeping only; times are the coordinator's seconds. A node that has only just
gone may still read its answer: its keys stay for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import Factory, define, frozen
from typing_extensions import Self

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._state import JobState
from elasticlib.rendezvous.protocol._exchange import heartbeat_key, mailbox_key

_LAST = 2
"""The last mailboxes of a node that may still have keys, once the node reads in the newest one."""
_MOST = 256
"""
The latest notices of a mailbox that are deleted. Heartbeats, maybe a stranger's, report how many it
had.
"""


@frozen
class _LastHeartbeat:
    """The last heartbeat of a node in its mailbox; -1: none came."""

    mailbox: str
    count: int

    def follows(self, other: _LastHeartbeat) -> bool:
        """Return whether the node lived after the *other* one; each mailbox counts from 0."""
        return self.count > (other.count if self.mailbox == other.mailbox else -1)


@define
class Garbage:
    """The mailboxes of each node, oldest first, each with the number of notices that it was given."""

    _mailboxes: dict[str, dict[str, int]] = Factory(dict)
    _gone: dict[str, float] = Factory(dict)
    """Nodes that are gone, and since when."""
    _ends: dict[str, tuple[_LastHeartbeat, float]] = Factory(dict)
    """Nodes that got the end: their last heartbeat, and since when."""
    _silent: dict[str, _LastHeartbeat] = Factory(dict)
    """
    Nodes that got the end, and whose heartbeats stopped before they had read it: the last one.
    """

    def copy(self) -> Self:
        """Return an independent copy."""
        return type(self)(dict(self._mailboxes), dict(self._gone), dict(self._ends), dict(self._silent))

    def opened(self, node: str, mailbox: str, sent: int = 0) -> None:
        """Note that the node reads in *mailbox*, which was given so many notices."""
        known = self._mailboxes.get(node, {})
        self._mailboxes[node] = {**known, mailbox: max(sent, known.get(mailbox, 0))}
        self._gone.pop(node, None)

    def know(self, mailboxes: Mapping[str, str], outbox: Outbox) -> None:
        """Take over the predecessor's live nodes, with their mailboxes."""
        for node, mailbox in mailboxes.items():
            self.opened(node, mailbox, outbox.next_index(mailbox))
        # They may be gone: each is waited for again once a heartbeat of it is read.
        for node, mailbox in outbox.unsure().items():
            self._silent[node] = _LastHeartbeat(mailbox, -1)

    def has_read(self, node: str, mailbox: str) -> None:
        """Note that the node reads there: it clears up its earlier mailboxes."""
        known = self._mailboxes.get(node, {})
        # Only a node that reads in its newest mailbox has cleared up the older ones.
        if len(known) > _LAST and next(reversed(known)) == mailbox:
            self._mailboxes[node] = dict(list(known.items())[-_LAST:])

    def sweep(self, here: Collection[str], now: float, timeout: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """
        Return the keys of nodes that were gone, and not *here*, for *timeout* seconds; and these
        nodes.
        """
        for node in self._mailboxes:
            if node in here:
                self._gone.pop(node, None)
            else:
                self._gone.setdefault(node, now)

        nodes = tuple(node for node, since in self._gone.items() if now >= since + timeout)
        keys: list[str] = []
        for node in nodes:
            del self._gone[node]
            for mailbox, sent in self._mailboxes.pop(node, {}).items():
                # One more than were sent: the node was woken up from its wait there.
                first = max(0, sent - _MOST)
                keys += (heartbeat_key(mailbox), *(mailbox_key(mailbox, index) for index in range(first, sent + 1)))

        return tuple(keys), nodes

    def give_up_silent(self, outbox: Outbox, counts: Mapping[str, int], now: float, timeout: float) -> None:
        """Stop waiting for nodes that got the end, and whose heartbeats have stopped since."""
        for node in list(outbox.end_unread):
            mailbox = outbox.mailbox_of(node)
            heartbeat = _LastHeartbeat(mailbox, counts.get(mailbox, -1))
            # The time of a node begins with the first look after its end.
            last, since = self._ends.setdefault(node, (heartbeat, now))
            if heartbeat.follows(last):
                self._ends[node] = heartbeat, now
            elif now >= since + timeout:
                outbox.forget(node)
                self._silent[node] = last

        # Nodes that have read the end are not waited for any more, either.
        for node in self._ends.keys() - outbox.end_unread:
            del self._ends[node]

    def expect(self, outbox: Outbox, node: str, mailbox: str) -> None:
        """
        Note that the node waits there: it counts as back at its first heartbeat, or is given up
        again.
        """
        outbox.expect(node, mailbox)
        self._silent[node] = _LastHeartbeat(mailbox, -1)

    def awaited(self, outbox: Outbox) -> Mapping[str, str]:
        """
        Return the last mailbox of each node that has not read the end: its heartbeats are there if
        it lives.
        """
        silent = {node: heartbeat.mailbox for node, heartbeat in self._silent.items()}
        return {**silent, **{node: outbox.mailbox_of(node) for node in outbox.end_unread}}

    def is_back(self, node: str, mailbox: str, count: int) -> bool:
        """
        Return whether a node that was given up before it read the end sends heartbeats; if so, wait
        for it again.
        """
        last = self._silent.get(node)
        if last is None:
            return False
        is_alive = _LastHeartbeat(mailbox, count).follows(last)
        if is_alive:
            del self._silent[node]
        return is_alive

    def clear_up(self, outbox: Outbox, watched: Collection[str], state: JobState, now: float) -> tuple[str, ...]:
        """Forget nodes that are gone; return the keys to delete for them."""
        here = outbox.end_unread.union(watched)
        keys, gone = self.sweep(here, now, state.rules.heartbeat)
        # Otherwise a notice that is never read would be written again without end.
        for node in gone:
            outbox.give_up(node)
        # As long as the job knows the node, its notices must keep their numbers.
        outbox.retain(here.union(state.waiting, () if state.round is None else state.round.entries))
        return keys

    def plain(self, here: Collection[str]) -> dict[str, Any]:
        """
        Return the mailboxes of nodes that are gone, as a JSON object for a successor; it knows
        those *here* already.
        """
        return {node: mailboxes for node, mailboxes in self._mailboxes.items() if node not in here}

    @classmethod
    def from_plain(cls, body: Mapping[str, Mapping[str, Any]], now: float) -> Self:
        """Return the object that `plain` encoded; raise ValueError for an invalid number."""
        mailboxes = {
            str(node): {str(mailbox): _untrusted.whole(sent, 0) for mailbox, sent in its.items()}
            for node, its in body.items()
        }
        return cls(mailboxes, dict.fromkeys(mailboxes, now))
