"""
The coordinator's outgoing mail: notices to write, and notices that may have to be written again.
Pure.

Rules of this file: bookkeeping only; times are the coordinator's seconds. A notice is kept until a
heartbeat of its node shows that it was read, or until the node has a newer mailbox. It is kept as
an object: a thousand nodes with the same notice share it, and a successor gets its text once.
Mailboxes have the names that `mailbox_name` makes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import Factory, define, evolve, frozen
from typing_extensions import Self

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._state import JobState
from elasticlib.rendezvous.protocol._exchange import CAUSE, mailbox_key
from elasticlib.rendezvous.protocol._messages import (
    CoordinatorNotice,
    Failed,
    Final,
    Message,
    RankAssignment,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._shortening import brief, refers

_LONGEST_MAILBOX = _untrusted.LONGEST_NAME + 1 + 20
"""Characters in the name of a mailbox: a node's, and the number of a message."""


@frozen
class _Notice:
    notice: CoordinatorNotice
    at: float
    """Time of the last write."""

    def shortened(self) -> Self:
        """Return the notice with a few lines of the root cause, if it is the end of the job."""
        if not isinstance(self.notice, Final):
            return self
        return evolve(self, notice=brief(self.notice))


@define
class Outbox:
    """Notices on their way, by mailbox."""

    _sent: dict[str, int] = Factory(dict)
    """Number of notices that each mailbox was given."""
    _unread: dict[str, dict[int, _Notice]] = Factory(dict)
    _due: dict[str, CoordinatorNotice] = Factory(dict)
    _mailboxes: dict[str, str] = Factory(dict)
    """The latest mailbox of each node."""
    end_unread: set[str] = Factory(set)
    """Nodes that were sent the end of the job, and have not reported that they read it."""

    def copy(self) -> Self:
        """Return an independent copy."""
        sent, unread, due, mailboxes = dict(self._sent), dict(self._unread), dict(self._due), dict(self._mailboxes)
        return type(self)(sent, unread, due, mailboxes, set(self.end_unread))

    def next_index(self, mailbox: str) -> int:
        """Return the number of the next notice in *mailbox*."""
        return self._sent.get(mailbox, 0)

    def add(self, mailbox: str, node: str, notice: CoordinatorNotice, now: float) -> int:
        """Add a notice to those that are due; return how many the mailbox was given now."""
        self._turn(node, mailbox)
        index = self._sent.get(mailbox, 0)
        self._sent[mailbox] = index + 1
        self._unread[mailbox] = {**self._unread.get(mailbox, {}), index: _Notice(notice, now)}
        self._due[mailbox_key(mailbox, index)] = notice
        if isinstance(notice, Final):
            self.end_unread.add(node)
        return index + 1

    def due(self) -> Mapping[str, CoordinatorNotice]:
        """Return the notices to write, by key."""
        return self._due

    def written(self, *, keep: bool) -> None:
        """
        Note that all due notices are in the store now; *keep* them for a reminder, where nodes
        report what they read.
        """
        self._due = {}
        if not keep:
            self._unread = {}

    def note(self, mailbox: str, read: int) -> None:
        """Note that the node has read the first *read* notices of its mailbox."""
        unread = self._unread.get(mailbox)
        if not unread:
            return
        self._unread[mailbox] = {index: notice for index, notice in unread.items() if index >= read}

    def opened(self, node: str, mailbox: str) -> None:
        """Note that the node reads no older mailbox any more."""
        old = self._mailboxes.get(node)
        if old is not None and old != mailbox:
            self._unread.pop(old, None)

    def _turn(self, node: str, mailbox: str) -> None:
        """Use *mailbox* for this node from now on, and no older one."""
        old = self._mailboxes.get(node)
        if old is not None and old != mailbox:
            self._sent.pop(old, None)
            self._unread.pop(old, None)
        self._mailboxes[node] = mailbox

    def is_untracked(self, node: str, mailbox: str, state: JobState) -> bool:
        """Return whether this mailbox is no longer tracked: the node left, or has a newer one."""
        known = self._mailboxes.get(node)
        if known is not None:
            return known != mailbox
        if state.final is not None:
            return True
        return state.round is not None and node in state.round.left

    def expect(self, node: str, mailbox: str) -> None:
        """Note that the node must get the end of the job in *mailbox*."""
        self._turn(node, mailbox)
        self._sent.setdefault(mailbox, 0)
        self.end_unread.add(node)

    def unsure(self) -> Mapping[str, str]:
        """Return the nodes that may not have read the end, though no unread notice of theirs is known."""
        mailboxes = {}
        for node in self.end_unread:
            mailbox = self._mailboxes[node]
            if not self._unread.get(mailbox):
                mailboxes[node] = mailbox
        return mailboxes

    def catch_up(self, node: str, mailbox: str, read: int) -> None:
        """Note that the node has read more notices there than this outbox knows."""
        self._turn(node, mailbox)
        self._sent[mailbox] = read
        self._unread.pop(mailbox, None)

    def give_up(self, node: str) -> None:
        """Forget the unread notices of a node that is gone: they are not written again."""
        self._unread.pop(self._mailboxes.get(node, ""), None)

    def retain(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        for node in [node for node in self._mailboxes if node not in nodes]:
            self.forget(node)

    def forget(self, node: str) -> None:
        """Note that the node needs no more notices."""
        self.end_unread.discard(node)
        mailbox = self._mailboxes.pop(node, None)
        if mailbox is not None:
            self._sent.pop(mailbox, None)
            self._unread.pop(mailbox, None)

    def mailbox_of(self, node: str) -> str:
        """Return the latest mailbox of the node; empty if it needs no more notices."""
        return self._mailboxes.get(node, "")

    def remind(self, now: float, timeout: float) -> None:
        """Make notices due again that were not read for *timeout* seconds."""
        for mailbox, notices in self._unread.items():
            for index, each in notices.items():
                if now >= each.at + timeout:
                    # A copy of the outbox shares these notices: they are replaced, never changed.
                    self._unread[mailbox] = {**self._unread[mailbox], index: evolve(each, at=now)}
                    self._due[mailbox_key(mailbox, index)] = each.notice

    def shorten(self) -> None:
        """Shorten each unread end of the job."""
        for mailbox, notices in self._unread.items():
            self._unread[mailbox] = {index: each.shortened() for index, each in notices.items()}

    def plain(self, state: JobState) -> dict[str, Any]:
        """
        Return a JSON object for a successor with that *state*; it leaves out what *state* contains.
        """
        texts: dict[CoordinatorNotice, int] = {}
        mailboxes = {}
        for node, mailbox in self._mailboxes.items():
            unread = [
                [index, _reference(each.notice, texts, state)] for index, each in self._unread.get(mailbox, {}).items()
            ]
            mailboxes[mailbox] = [self._sent[mailbox], int(node in self.end_unread), unread]
        return {"boxes": mailboxes, "texts": [encode(notice).decode("ascii") for notice in texts]}

    @classmethod
    def from_plain(cls, body: Mapping[str, Any], state: JobState, now: float) -> Self:
        """
        Return the outbox that `plain` encoded in *body*.

        All unread notices are due again, as their last write is not certain. Raises ValueError,
        KeyError, IndexError or TypeError for any other data.
        """
        outbox = cls()
        texts = [_notice(text) for text in _untrusted.exactly(body["texts"], list)]
        for mailbox, (sent, end_unread, unread) in _untrusted.exactly(body["boxes"], dict).items():
            node = _untrusted.name(mailbox, _LONGEST_MAILBOX).rpartition("/")[0]
            outbox._sent[mailbox] = _untrusted.whole(sent, 0)
            outbox._mailboxes[node] = mailbox
            if end_unread:
                outbox.end_unread.add(node)
            for index, reference in unread:
                notice = _referred(reference, texts, state)
                outbox._restore(mailbox, _untrusted.whole(index, 0), notice, now)

        return outbox

    def _restore(self, mailbox: str, index: int, notice: CoordinatorNotice, now: float) -> None:
        self._unread.setdefault(mailbox, {})[index] = _Notice(notice, now)
        self._due[mailbox_key(mailbox, index)] = notice


# References replace notices that the state contains already: None is the end of the job, -1 and
# below are the ranks of the present round by group rank. 0 and above are texts.


def _reference(notice: CoordinatorNotice, texts: dict[CoordinatorNotice, int], state: JobState) -> int | None:
    """
    Return the reference to a *notice*; add it to the *texts* if the state does not contain it.
    """
    if notice == state.final:
        return None
    if state.round is not None and isinstance(notice, RankAssignment):
        rank = notice.group_rank
        if notice in state.round.assignments[rank : rank + 1]:
            return -1 - rank
    return texts.setdefault(notice, len(texts))


def _referred(reference: int | None, texts: Sequence[CoordinatorNotice], state: JobState) -> CoordinatorNotice:
    """Return the notice of a *reference*; raise ValueError or IndexError for an invalid one."""
    found: CoordinatorNotice | None
    if reference is None:
        found = state.final
    elif _untrusted.whole(reference) >= 0:
        found = texts[reference]
    else:
        found = None if state.round is None else state.round.assignments[-1 - reference]

    if found is None:
        raise ValueError(f"it refers to message {_untrusted.shown(reference)}, which it does not contain")

    return found


def referring(due: Mapping[str, CoordinatorNotice]) -> dict[str, Message]:
    """
    Return the messages to write, in this order.

    A long root cause comes first, in one place for all nodes: each of ten thousand notices has only
    a few lines of it.
    """
    # Thousands of notices share one end of the job: it is shortened once, by its identity.
    short: dict[int, CoordinatorNotice] = {}
    causes: dict[str, Message] = {}
    for notice in due.values():
        if isinstance(notice, Final) and id(notice) not in short:
            short[id(notice)] = refers(notice)
            if short[id(notice)] is not notice:
                causes.update(_whole_cause(notice))
    notices = {key: short.get(id(notice), notice) for key, notice in due.items()}
    return causes | notices


def _whole_cause(final: Final) -> dict[str, Message]:
    """Return the whole root cause of *final*, by its key."""
    if final.root_node is None or final.root is None:
        return {}
    return {CAUSE: Failed(final.root_node, 0, (final.root,))}


def _notice(text: Any) -> CoordinatorNotice:
    message = decode(_untrusted.exactly(text, str).encode("ascii"))
    if not isinstance(message, CoordinatorNotice):
        raise ValueError(f"it contains a {type(message).__name__}, which a coordinator never sends")
    return message
