"""
Keys of nodes that are gone: nobody will read them any more, so the coordinator deletes them. Pure.

A node that lives clears up behind itself: once it reads in a new box, it deletes what is left of the old ones. What
it did not come to, when it is lost, leaves or has read the end, lies in its last boxes.

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
from elasticlib.rendezvous.protocol._exchange import beat_key, box_key

_LAST = 2
"""Boxes of a node that reads in the last of them, in which something may be left."""


_MOST = 256
"""Notices of a box that are deleted, the latest ones: how many it had is told by beats, which may be a stranger's."""


@frozen
class _Beat:
    """The last beat of a node in its box; -1: none came."""

    box: str
    count: int

    def follows(self, other: _Beat) -> bool:
        """Whether the node lived after the *other* one; each box counts anew."""
        return self.count > (other.count if self.box == other.box else -1)


@define
class Garbage:
    """The boxes of each node, oldest first, each with the number of notices that it was given."""

    _boxes: dict[str, dict[str, int]] = Factory(dict)
    _gone: dict[str, float] = Factory(dict)
    """Nodes that are gone, and since when."""
    _ends: dict[str, tuple[_Beat, float]] = Factory(dict)
    """Nodes that were told the end: their last beat, and since when."""
    _buried: dict[str, _Beat] = Factory(dict)
    """Those of them whose beats stopped before they had read it, and the last one."""

    def copy(self) -> Self:
        """The same, to be changed apart."""
        return type(self)(dict(self._boxes), dict(self._gone), dict(self._ends), dict(self._buried))

    def opened(self, node: str, box: str, told: int = 0) -> None:
        """The node waits for answers there, of which it was given so many."""
        known = self._boxes.get(node, {})
        self._boxes[node] = {**known, box: max(told, known.get(box, 0))}
        self._gone.pop(node, None)

    def know(self, boxes: Mapping[str, str], mail: Outbox) -> None:
        """The nodes that live, at the beginning, and their boxes."""
        for node, box in boxes.items():
            self.opened(node, box, mail.next_index(box))
        for node, box in mail.unsure().items():
            self._buried[node] = _Beat(box, -1)

    def has_read(self, node: str, box: str) -> None:
        """The node reads there: it has cleared up, or is about to, what lay in boxes before the last one."""
        known = self._boxes.get(node, {})
        if len(known) > _LAST and next(reversed(known)) == box:
            self._boxes[node] = dict(list(known.items())[-_LAST:])

    def sweep(self, here: Collection[str], now: float, patience: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Keys of nodes that have been gone, who are not *here*, for *patience* seconds; and these nodes."""
        for node in self._boxes:
            if node in here:
                self._gone.pop(node, None)
            else:
                self._gone.setdefault(node, now)
        nodes = tuple(node for node, since in self._gone.items() if now >= since + patience)
        keys: list[str] = []
        for node in nodes:
            del self._gone[node]
            for box, told in self._boxes.pop(node, {}).items():
                # One more than it was told: where it was woken up from its wait.
                first = max(0, told - _MOST)
                keys += (beat_key(box), *(box_key(box, index) for index in range(first, told + 1)))
        return tuple(keys), nodes

    def bury(self, mail: Outbox, counts: Mapping[str, int], now: float, patience: float) -> None:
        """Wait no more for nodes that were told the end, and whose beats have stopped since."""
        for node in list(mail.unparted):
            box = mail.box_of(node)
            beat = _Beat(box, counts.get(box, -1))
            seen, since = self._ends.get(node, (None, now))
            if seen is None or beat.follows(seen):
                self._ends[node] = beat, now
            elif now >= since + patience:
                mail.part(node)
                self._buried[node] = seen
        self._ends = {node: it for node, it in self._ends.items() if node in mail.unparted}

    def expect(self, mail: Outbox, node: str, box: str) -> None:
        """The node has written that it waits there: it is back once it beats, or else given up again."""
        mail.expect(node, box)
        self._buried[node] = _Beat(box, -1)

    def awaited(self, mail: Outbox) -> Mapping[str, str]:
        """Nodes that have not read the end, and where they beat if they live: in which box they asked last."""
        buried = {node: beat.box for node, beat in self._buried.items()}
        return {**buried, **{node: mail.box_of(node) for node in mail.unparted}}

    def has_come_back(self, node: str, box: str, count: int) -> bool:
        """Whether a node that was given up before it had read the end beats on, and so is waited for again."""
        if node not in self._buried or not _Beat(box, count).follows(self._buried[node]):
            return False
        del self._buried[node]
        return True

    def clear_up(self, mail: Outbox, watched: Collection[str], state: State, now: float) -> tuple[str, ...]:
        """Those who are gone get no mail any more; and the keys that are to be deleted for them."""
        here = mail.unparted.union(watched)
        keys, gone = self.sweep(here, now, state.rules.heartbeat)
        for node in gone:
            mail.give_up(node)
        # As long as it is known to the job, what it was told must not be numbered anew.
        mail.retain(here.union(state.waiting, () if state.round is None else state.round.entries))
        return keys

    def plain(self, here: Collection[str]) -> dict[str, Any]:
        """As a JSON object, for whoever takes over: those who are gone; the boxes of who is *here* are known."""
        return {node: boxes for node, boxes in self._boxes.items() if node not in here}

    @classmethod
    def from_plain(cls, body: Mapping[str, Mapping[str, Any]], now: float) -> Self:
        """What `plain` made; ValueError for a number that counts nothing."""
        boxes = {
            str(node): {str(box): _untrusted.whole(told, 0) for box, told in its.items()} for node, its in body.items()
        }
        return cls(boxes, dict.fromkeys(boxes, now))
