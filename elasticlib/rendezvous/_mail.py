"""
The coordinator's outgoing mail: what is to be written, and what may have to be written again. Pure.

Rules of this file: bookkeeping only; times are the coordinator's seconds. A notice is kept until a beat of
its node says that it was read, or until a newer box of the node takes its place. It is kept as what it says: a
thousand nodes that are told the same share one object, and one text in what a successor gets. Boxes have the names
that `box_name` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, define, evolve, frozen

from elasticlib.rendezvous._exchange import box_key
from elasticlib.rendezvous._messages import Final, Notice, RoundEnd, Seat, decode, encode
from elasticlib.rendezvous._shortening import brief
from elasticlib.rendezvous._state import State


@frozen
class _Notice:
    notice: Notice
    at: float


@define
class Mail:
    """Notices on their way, by box."""

    _told: dict[str, int] = Factory(dict)
    """How many notices each box was given."""
    _unread: dict[str, dict[int, _Notice]] = Factory(dict)
    _due: dict[str, Notice] = Factory(dict)
    _boxes: dict[str, str] = Factory(dict)
    """The latest box of each node."""
    unparted: set[str] = Factory(set)
    """Nodes that were told how the job ended, and have not said that they read it."""
    _ends: dict[str, tuple[int | None, float]] = Factory(dict)
    """For each of those the last count of its beats, and since when."""

    def copy(self) -> Mail:
        """The same, to be changed apart."""
        unparted, ends = set(self.unparted), dict(self._ends)
        return Mail(dict(self._told), dict(self._unread), dict(self._due), dict(self._boxes), unparted, ends)

    def add(self, box: str, node: str, notice: Notice, now: float) -> None:
        """Put a notice among what is to be written."""
        old = self._boxes.get(node)
        if old is not None and old != box:
            self._told.pop(old, None)
            self._unread.pop(old, None)
        self._boxes[node] = box
        index = self._told.get(box, 0)
        self._told[box] = index + 1
        self._unread[box] = {**self._unread.get(box, {}), index: _Notice(notice, now)}
        self._due[box_key(box, index)] = notice
        if isinstance(notice, Final):
            self.unparted.add(node)

    def due(self) -> Mapping[str, Notice]:
        """What is to be written, by key."""
        return self._due

    def written(self, *, keep: bool) -> None:
        """All that was due is in the store now; *keep* it for a reminder, where nodes tell what they read."""
        self._due = {}
        if not keep:
            self._unread = {}

    def note(self, box: str, read: int) -> None:
        """The node has read the first *read* notices of its box."""
        unread = self._unread.get(box)
        if unread:
            self._unread[box] = {index: notice for index, notice in unread.items() if index >= read}

    def part(self, node: str) -> None:
        """The node needs no mail any more."""
        self.unparted.discard(node)
        box = self._boxes.pop(node, None)
        if box is not None:
            self._told.pop(box, None)
            self._unread.pop(box, None)

    def box_of(self, node: str) -> str:
        """The latest box of the node; empty when it needs no mail any more."""
        return self._boxes.get(node, "")

    def remind(self, now: float, patience: float) -> None:
        """Write again what was not read for *patience* seconds."""
        for box, notices in self._unread.items():
            late = {index: evolve(notice, at=now) for index, notice in notices.items() if now >= notice.at + patience}
            if late:
                self._unread[box] = {**notices, **late}
                self._due.update({box_key(box, index): notice.notice for index, notice in late.items()})

    def bury(self, counts: Mapping[str, int], now: float, patience: float) -> None:
        """Wait no more for nodes that were told the end, and whose beats have stopped since."""
        for node in list(self.unparted):
            count = counts.get(self.box_of(node))
            seen, since = self._ends.get(node, (None, now))
            if node not in self._ends or (count is not None and (seen is None or count > seen)):
                self._ends[node] = (count, now)
            elif now >= since + patience:
                self.part(node)

    def shorten(self) -> None:
        """Say less of how the job ended, where that was not read yet."""
        for box, notices in self._unread.items():
            self._unread[box] = {
                index: evolve(each, notice=brief(each.notice)) if isinstance(each.notice, Final) else each
                for index, each in notices.items()
            }

    def plain(self, state: State) -> dict[str, Any]:
        """As a JSON object, for whoever takes over with that *state*; what the state says is not said again."""
        texts: dict[Notice, int] = {}
        seats = () if state.round is None else state.round.seats

        def place(notice: Notice) -> int | None:
            if notice == state.final:
                return None
            if isinstance(notice, Seat) and notice.group_rank < len(seats) and notice == seats[notice.group_rank]:
                return -1 - notice.group_rank
            return texts.setdefault(notice, len(texts))

        boxes = {
            box: [
                self._told[box],
                int(node in self.unparted),
                [[index, place(each.notice)] for index, each in self._unread.get(box, {}).items()],
            ]
            for node, box in self._boxes.items()
        }
        return {"boxes": boxes, "texts": [encode(notice).decode("ascii") for notice in texts]}

    @classmethod
    def from_plain(cls, body: Mapping[str, Any], state: State, now: float) -> Mail:
        """What `plain` made; everything unread is due again, as its last writing is not certain."""
        mail = cls()
        texts = [_notice(text) for text in body["texts"]]

        def at(place: int | None) -> Notice:
            if place is None and state.final is not None:
                return state.final
            if place is not None and place >= 0:
                return texts[place]
            if place is None or state.round is None:
                raise ValueError(f"the mail speaks of {place!r:.40}, which is not there")
            return state.round.seats[-1 - place]

        for box, (told, unparted, unread) in body["boxes"].items():
            node = box.rpartition("/")[0]
            mail._told[box], mail._boxes[node] = int(told), box
            if unparted:
                mail.unparted.add(node)
            notices = {int(index): _Notice(at(place), now) for index, place in unread}
            if notices:
                mail._unread[box] = notices
                mail._due.update({box_key(box, index): each.notice for index, each in notices.items()})
        return mail


def _notice(text: str) -> Notice:
    message = decode(text.encode("ascii"))
    if not isinstance(message, (Seat, RoundEnd, Final)):
        raise ValueError(f"a {type(message).__name__} lies where a notice should")
    return message
