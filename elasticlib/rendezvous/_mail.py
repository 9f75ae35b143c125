"""
The coordinator's outgoing mail: what is to be written, and what may have to be written again. Pure.

Rules of this file: bookkeeping only; times are the coordinator's seconds. A notice is kept until a beat of
its node says that it was read, or until a newer box of the node takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Mapping
from typing import Any

from attrs import Factory, define, evolve, frozen

from elasticlib import _untrusted
from elasticlib.rendezvous._exchange import box_key
from elasticlib.rendezvous._messages import Final, GivenUp, Notice
from elasticlib.rendezvous._state import State

_DIGITS = 20
"""Of the number of a letter, or of a notice."""


@frozen
class _Notice:
    data: bytes
    at: float


@define
class Mail:
    """Notices on their way, by box."""

    _told: dict[str, int] = Factory(dict)
    """How many notices each box was given."""
    _unread: dict[str, dict[int, _Notice]] = Factory(dict)
    _due: dict[str, bytes] = Factory(dict)
    _boxes: dict[str, str] = Factory(dict)
    """The latest box of each node."""
    unparted: set[str] = Factory(set)
    """Nodes that were told how the job ended, and have not said that they read it."""

    def copy(self) -> Mail:
        """The same, to be changed apart."""
        return Mail(dict(self._told), dict(self._unread), dict(self._due), dict(self._boxes), set(self.unparted))

    def next_index(self, box: str) -> int:
        """The number of the next notice in *box*."""
        return self._told.get(box, 0)

    def add(self, box: str, node: str, index: int, data: bytes, notice: Notice | GivenUp, now: float) -> None:
        """Put a notice among what is to be written."""
        old = self._boxes.get(node)
        if old is not None and old != box:
            self._told.pop(old, None)
            self._unread.pop(old, None)
        self._boxes[node] = box
        self._told[box] = index + 1
        self._unread[box] = {**self._unread.get(box, {}), index: _Notice(data, now)}
        self._due[box_key(box, index)] = data
        if isinstance(notice, Final):
            self.unparted.add(node)

    def due(self) -> Mapping[str, bytes]:
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

    def opened(self, node: str, box: str) -> None:
        """The node looks into no older box any more."""
        old = self._boxes.get(node)
        if old is not None and old != box:
            self._unread.pop(old, None)

    def is_parted(self, node: str, box: str, state: State) -> bool:
        """Whether it is not known any more what the node was told there, as it needs no mail."""
        known = self._boxes.get(node)
        gone = state.final is not None or (state.round is not None and node in state.round.left)
        return gone if known is None else known != box

    def catch_up(self, node: str, box: str, read: int) -> None:
        """The node has read more there than is known here."""
        self._boxes[node], self._told[box] = box, read
        self._unread.pop(box, None)

    def give_up(self, node: str) -> None:
        """The node is gone: what it did not read is not written again."""
        self._unread.pop(self._boxes.get(node, ""), None)

    def retain(self, nodes: Collection[str]) -> None:
        """Forget all others."""
        for node in [node for node in self._boxes if node not in nodes]:
            self.part(node)

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
                self._due.update({box_key(box, index): notice.data for index, notice in late.items()})

    def plain(self) -> dict[str, Any]:
        """As a JSON object, for whoever takes over."""
        unread = {
            box: {str(index): notice.data.decode("ascii") for index, notice in notices.items()}
            for box, notices in self._unread.items()
            if notices
        }
        return {"told": self._told, "unread": unread, "boxes": self._boxes, "unparted": sorted(self.unparted)}

    @classmethod
    def from_plain(cls, body: Mapping[str, Any], now: float) -> Mail:
        """
        What `plain` made; everything unread is due again, as its last writing is not certain.

        Raises ValueError, KeyError or TypeError for anything else.
        """
        mail = cls()
        mail._told = {_box(box): _untrusted.whole(count, 0) for box, count in _members(body["told"])}
        mail._boxes = {_untrusted.name(node): _box(box) for node, box in _members(body["boxes"])}
        mail.unparted = {_untrusted.name(node) for node in _untrusted.exactly(body["unparted"], list)}
        for box, texts in _members(body["unread"]):
            notices = {_index(index): _untrusted.exactly(text, str).encode("ascii") for index, text in _members(texts)}
            mail._unread[_box(box)] = {index: _Notice(data, now) for index, data in notices.items()}
            mail._due.update({box_key(box, index): data for index, data in notices.items()})
        return mail


def _members(value: Any) -> ItemsView[str, Any]:
    members: dict[str, Any] = _untrusted.exactly(value, dict)
    return members.items()


def _box(value: Any) -> str:
    return _untrusted.name(value, _untrusted.LONGEST_NAME + 1 + _DIGITS)  # as `box_name` makes it


def _index(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
        raise ValueError(f"{_untrusted.shown(text)} is no number of a notice")
    return int(text)
