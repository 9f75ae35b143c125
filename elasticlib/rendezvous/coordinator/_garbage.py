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

from attrs import Factory, define
from typing_extensions import Self

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._state import State
from elasticlib.rendezvous.protocol._exchange import beat_key, box_key

_LAST = 2
"""Boxes of a node that reads in the last of them, in which something may be left."""


_MOST = 256
"""Notices of a box that are deleted, the latest ones: how many it had is told by beats, which may be a stranger's."""


@define
class Garbage:
    """The boxes of each node, oldest first, each with the number of notices that it was given."""

    _boxes: dict[str, dict[str, int]] = Factory(dict)
    _gone: dict[str, float] = Factory(dict)
    """Nodes that are gone, and since when."""
    _ends: dict[str, tuple[int | None, float]] = Factory(dict)
    """Nodes that were told the end: their last count, and since when."""
    _buried: set[str] = Factory(set)
    """Those of them whose beats stopped before they had read it."""

    def copy(self) -> Self:
        """The same, to be changed apart."""
        return type(self)(dict(self._boxes), dict(self._gone), dict(self._ends), set(self._buried))

    def opened(self, node: str, box: str, told: int = 0) -> None:
        """The node waits for answers there, of which it was given so many."""
        known = self._boxes.get(node, {})
        self._boxes[node] = {**known, box: max(told, known.get(box, 0))}
        self._gone.pop(node, None)

    def know(self, boxes: Mapping[str, str], mail: Outbox) -> None:
        """The nodes that live, at the beginning, and their boxes."""
        for node, box in boxes.items():
            self.opened(node, box, mail.next_index(box))

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
            count = counts.get(mail.box_of(node))
            seen, since = self._ends.get(node, (None, now))
            if node not in self._ends or (count is not None and (seen is None or count > seen)):
                self._ends[node] = (count, now)
            elif now >= since + patience:
                mail.part(node)
                self._buried.add(node)
        self._ends = {node: it for node, it in self._ends.items() if node in mail.unparted}

    def is_back(self, node: str) -> bool:
        """Whether a node that beats had been given up before it had read the end; said once."""
        back = node in self._buried
        self._buried.discard(node)
        return back

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
