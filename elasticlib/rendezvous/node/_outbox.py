"""
A node's letters on their way to the coordinator, in order and each said once. Pure.

Rules of this file: a letter keeps its number and its text however often it is sent, so that a coordinator which
got it already knows it; it has at most `LETTER` bytes. The letter that asks for a seat opens a box, in which its
answers will lie. Of failures only a little is said unasked: of a thousand nodes one has the root cause.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.errors import RendezvousError
from elasticlib.rendezvous.node._session_events import Denied, Describe
from elasticlib.rendezvous.protocol._messages import Close, Failed, Join, Report, Stopped, encode
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._shortening import early, fitting, whole


@frozen
class Written:
    """A letter; it is no report yet as long as nobody has said what this node brings."""

    seq: int
    what: Report | Describe


@frozen
class Outbox:
    """What is to be said, and how far the saying has come."""

    letters: tuple[Written, ...] = ()
    seq: int = 0
    """Number of the last letter that was written."""
    said: int = 0
    """Number of the last letter that is in the store."""
    wish: int = 0
    """Number of the last letter that asks for a seat; 0: there is none."""
    wish_sent: float | None = None
    """When it was sent for the first time: it may have arrived then, though nothing came back."""
    join: Join | None = None
    """What that letter says."""
    whole: Failed | Stopped | None = None
    """The latest failures, with all that a letter could say of them."""
    asked: int = -1
    """The round of whose failures all is to be said."""

    @property
    def next(self) -> Written | None:
        """The letter to be sent; None: all are said."""
        return self.letters[0] if self.letters else None

    @property
    def has_wished(self) -> bool:
        """Whether the last letter that asks for a seat was said."""
        return self.wish > 0 and self.said >= self.wish

    def add(self, what: Report | Describe) -> Self:
        """With one letter more."""
        if isinstance(what, (Failed, Stopped)):
            return self._add_failures(whole(what))
        out = self._with(what if isinstance(what, Describe) else fitting(what))
        return evolve(out, wish=out.seq, wish_sent=None, join=None) if isinstance(what, Describe) else out

    def elaborate(self, round: int, node: str) -> Self:
        """With all that is known of the failures of that *round*, now and from now on."""
        out, whole = evolve(self, asked=round), self.whole
        if whole is None or whole.round != round:
            return out
        return out._with(Failed(node, round, whole.failures))  # whether workers still run here was said, or will be

    def _add_failures(self, what: Failed | Stopped) -> Self:
        out = self._with(what if what.round == self.asked else early(what, self.whole))
        return evolve(out, whole=what) if what.failures else out

    def _with(self, what: Report | Describe) -> Self:
        seq = self.seq + 1
        return evolve(self, letters=(*self.letters, Written(seq, what)), seq=seq)

    def described(self, seq: int, report: Report) -> Self:
        """The letter *seq* is known now."""
        join = report if seq == self.wish and isinstance(report, Join) else self.join
        return evolve(
            self, join=join, letters=tuple(Written(seq, report) if it.seq == seq else it for it in self.letters)
        )

    def denied(self, event: Denied, posted: bool, node: str) -> tuple[Self, RendezvousError | None]:
        """
        The store is there, and refuses what *node* asked; an error when that ends its part.

        Of a letter that was *posted* less is said, and if that does not help, in its place, that the job cannot go
        on: the store does not have it, so its number is free.
        """
        letter, error = self.next, RendezvousError(f"node {node} cannot go on: {event.why}")
        if not posted or letter is None:
            return self, error
        what = letter.what
        if event.too_large and isinstance(what, (Failed, Stopped)):
            size = len(encode(what))
            if len(encode(less := fitting(what, size // 2))) < size:
                return self.described(letter.seq, less), None
        if isinstance(what, Close):
            return evolve(self, letters=()), error
        told = fitting(Close(node, f"the store refused a message of node {node}: {event.why}"))
        return self.described(letter.seq, told), error

    def sent(self, seq: int, now: float) -> Self:
        """The letter *seq* goes out."""
        return evolve(self, wish_sent=now) if seq == self.wish and self.wish_sent is None else self

    def done(self, seq: int) -> Self:
        """The letter *seq*, which was the next one, is in the store."""
        return evolve(self, letters=self.letters[1:], said=max(seq, self.said))

    def again(self, seen: Seen) -> Self:
        """
        With the last letter that asked for a seat once more, should the coordinator not know it, or not any more.

        It has its old number, and is nothing to who knows it; it says how far this node knows the job to have come.
        """
        if self.join is None or not self.has_wished or any(letter.seq == self.wish for letter in self.letters):
            return self
        join = evolve(self.join, round=seen.round, epoch=seen.epoch, pulse=seen.pulse)
        return evolve(self, letters=(Written(self.wish, join), *self.letters))
