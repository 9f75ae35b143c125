"""
The coordinator's outgoing mail: what is to be written, and what may have to be written again. Pure.

Rules of this file: bookkeeping only; times are the coordinator's seconds. A notice is kept until a beat of
its node says that it was read, or until a newer box of the node takes its place. It is kept as what it says: a
thousand nodes that are told the same share one object, and one text in what a successor gets. Boxes have the names
that `box_name` makes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import Factory, define, evolve, frozen
from typing_extensions import Self

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._state import State
from elasticlib.rendezvous.protocol._exchange import CAUSE, box_key
from elasticlib.rendezvous.protocol._messages import Failed, Final, Message, RankAssignment, Told, decode, encode
from elasticlib.rendezvous.protocol._shortening import brief, refers

_LONGEST_BOX = _untrusted.LONGEST_NAME + 1 + 20
"""Characters in the name of a box: a node's, and the number of a letter."""


@frozen
class _Notice:
    notice: Told
    at: float


@define
class Outbox:
    """Notices on their way, by box."""

    _told: dict[str, int] = Factory(dict)
    """How many notices each box was given."""
    _unread: dict[str, dict[int, _Notice]] = Factory(dict)
    _due: dict[str, Told] = Factory(dict)
    _boxes: dict[str, str] = Factory(dict)
    """The latest box of each node."""
    unparted: set[str] = Factory(set)
    """Nodes that were told how the job ended, and have not said that they read it."""

    def copy(self) -> Self:
        """The same, to be changed apart."""
        told, unread, due, boxes = dict(self._told), dict(self._unread), dict(self._due), dict(self._boxes)
        return type(self)(told, unread, due, boxes, set(self.unparted))

    def next_index(self, box: str) -> int:
        """The number of the next notice in *box*."""
        return self._told.get(box, 0)

    def add(self, box: str, node: str, notice: Told, now: float) -> int:
        """Put a notice among what is to be written; how many the box was given now."""
        old = self._boxes.get(node)
        if old is not None and old != box:
            self._told.pop(old, None)
        self._boxes[node] = box
        index = self._told.get(box, 0)
        self._told[box] = index + 1
        self._unread[box] = {**self._unread.get(box, {}), index: _Notice(notice, now)}
        self._due[box_key(box, index)] = notice
        if isinstance(notice, Final):
            self.unparted.add(node)
        return index + 1

    def due(self) -> Mapping[str, Told]:
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

    def expect(self, node: str, box: str) -> None:
        """The node is to be told the end there."""
        self._boxes[node] = box
        self._told.setdefault(box, 0)
        self.unparted.add(node)

    def unsure(self) -> Mapping[str, str]:
        """Nodes that have not said that they read the end, though nothing of it lies unread in their box."""
        return {node: box for node in self.unparted if not self._unread.get(box := self._boxes[node])}

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
                self._due.update({box_key(box, index): notice.notice for index, notice in late.items()})

    def shorten(self) -> None:
        """Say less of how the job ended, where that was not read yet."""
        for box, notices in self._unread.items():
            self._unread[box] = {
                index: evolve(each, notice=brief(each.notice)) if isinstance(each.notice, Final) else each
                for index, each in notices.items()
            }

    def plain(self, state: State) -> dict[str, Any]:
        """As a JSON object, for whoever takes over with that *state*; what the state says is not said again."""
        texts: dict[Told, int] = {}
        seats = () if state.round is None else state.round.seats

        def place(notice: Told) -> int | None:
            if notice == state.final:
                return None
            if (
                isinstance(notice, RankAssignment)
                and notice.group_rank < len(seats)
                and notice == seats[notice.group_rank]
            ):
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
    def from_plain(cls, body: Mapping[str, Any], state: State, now: float) -> Self:
        """
        What `plain` made; everything unread is due again, as its last writing is not certain.

        Raises ValueError, KeyError, IndexError or TypeError for anything else.
        """
        mail = cls()
        texts = [_notice(text) for text in _untrusted.exactly(body["texts"], list)]

        def at(place: int | None) -> Told:
            if place is None and state.final is not None:
                return state.final
            if place is not None and _untrusted.whole(place) >= 0:
                return texts[place]
            if place is None or state.round is None:
                raise ValueError(f"the outbox names the node {_untrusted.shown(place)}, which is not known")
            return state.round.seats[-1 - place]

        for box, (told, unparted, unread) in _untrusted.exactly(body["boxes"], dict).items():
            node = _untrusted.name(box, _LONGEST_BOX).rpartition("/")[0]
            mail._told[box], mail._boxes[node] = _untrusted.whole(told, 0), box
            if unparted:
                mail.unparted.add(node)
            notices = {_untrusted.whole(index, 0): _Notice(at(place), now) for index, place in unread}
            if notices:
                mail._unread[box] = notices
                mail._due.update({box_key(box, index): each.notice for index, each in notices.items()})
        return mail


def referring(due: Mapping[str, Told]) -> dict[str, Message]:
    """
    All that is to be written, in this order.

    A long root cause comes first, in one place for all: of ten thousand notices each has a few lines of it.
    """
    finals = {id(notice): notice for notice in due.values() if isinstance(notice, Final)}
    short = {each: refers(final) for each, final in finals.items()}
    found: dict[str, Message] = {}
    for each, final in finals.items():
        if short[each] is not final and final.root_node is not None and final.root is not None:
            found[CAUSE] = Failed(final.root_node, 0, (final.root,))
    return found | {key: short.get(id(notice), notice) for key, notice in due.items()}


def _notice(text: Any) -> Told:
    message = decode(_untrusted.exactly(text, str).encode("ascii"))
    if not isinstance(message, Told):
        raise ValueError(f"a {type(message).__name__} is where a notice should be")
    return message
