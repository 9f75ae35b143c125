"""
A node's messages on their way to the coordinator, in order and each sent once. Pure.

Rules of this file: a message keeps its number and its text however often it is sent, so that a
coordinator which has it recognizes it. It has at most `ENVELOPE` bytes. The message that asks for
ranks opens the mailbox for its answers. Failures are sent in brief unless the coordinator asks: of
a thousand nodes one has the root cause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.errors import RendezvousError
from elasticlib.rendezvous.node._session_events import Denied, Describe
from elasticlib.rendezvous.protocol._messages import Close, Failed, Join, Report, Stopped, Succeeded, encode
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._shortening import early, fitting, whole


@frozen
class Written:
    """A message; it is not a report until this node's descriptor is known."""

    seq: int
    what: Report | Describe


@frozen
class NodeOutbox:
    """Messages to send, and how far they were sent."""

    envelopes: tuple[Written, ...] = ()
    seq: int = 0
    """Number of the last message that was written."""
    stored: int = 0
    """Number of the last message that is in the store."""
    join_seq: int = 0
    """Number of the last message that asks for ranks; 0: none."""
    join_sent: float | None = None
    """Time of the first attempt to send it: it may have arrived then, though no answer came."""
    join: Join | None = None
    """The content of the message."""
    succeeded: int = -1
    """The round whose success was reported before ranks were asked for, by an earlier sidecar."""
    late: tuple[Written, ...] = ()
    """
    Messages sent since the last but one request for ranks; the coordinator may not have read them.
    """
    whole: Failed | Stopped | None = None
    """The latest failures, with all details that fit into a message."""
    requested: int = -1
    """The round whose failures were all requested."""

    @property
    def next(self) -> Written | None:
        """The message to send next; None: all were sent."""
        if not self.envelopes:
            return None
        return self.envelopes[0]

    @property
    def has_joined(self) -> bool:
        """True if the last message that asks for ranks was sent."""
        return self.join_seq > 0 and self.stored >= self.join_seq

    def add(self, what: Report | Describe) -> Self:
        """Return the outbox with one more message."""
        match what:
            case Failed() | Stopped() | Succeeded() if self.join_seq == 0:
                return self._with_outcome_of_former(what)
            case Failed() | Stopped():
                return self._with_failures(whole(what))
            case Describe():
                out = self._with(what)
                return evolve(out, join_seq=out.seq, join_sent=None, join=None)
            case _:
                return self._with(fitting(what))

    def _with_outcome_of_former(self, what: Failed | Stopped | Succeeded) -> Self:
        """Return the outbox with the outcome of a round of a former sidecar: only a success counts."""
        if not isinstance(what, Succeeded):
            # The request for ranks will report that all workers are gone.
            return self
        return evolve(self, succeeded=what.round)

    def _with_failures(self, report: Failed | Stopped) -> Self:
        """Return the outbox with a whole *report*, in full only if the coordinator has asked for it."""
        # Thousands of nodes may report at once.
        is_requested = report.round == self.requested
        out = self._with(report if is_requested else early(report, self.whole))
        if not report.failures:
            return out
        return evolve(out, whole=report)

    def elaborate(self, round: int, node: str) -> Self:
        """Return an outbox that sends all known failures of the *round*, now and from now on."""
        out = evolve(self, requested=round)
        if self.whole is None or self.whole.round != round:
            return out
        # Another message reports whether workers run here.
        return out._with(Failed(node, round, self.whole.failures))

    def _with(self, what: Report | Describe) -> Self:
        seq = self.seq + 1
        return evolve(self, envelopes=(*self.envelopes, Written(seq, what)), seq=seq)

    def described(self, seq: int, report: Report) -> Self:
        """Return the outbox with *report* as the content of message *seq*."""
        join = self.join
        if isinstance(report, Join):
            report = evolve(report, succeeded=self.succeeded)
            join = report if seq == self.join_seq else join
        envelopes = []
        for each in self.envelopes:
            envelopes.append(Written(seq, report) if each.seq == seq else each)
        return evolve(self, join=join, envelopes=tuple(envelopes))

    def denied(self, event: Denied, posted: bool, node: str) -> tuple[Self, RendezvousError | None]:
        """
        Handle the store's refusal of a request of *node*; return an error if that ends the node's
        part.

        Of a message that was *posted* a shorter form is sent. If that does not help, a `Close`
        replaces it. The store does not have the message, so its number is free.
        """
        envelope = self.next
        error = RendezvousError(f"node {node} cannot continue: {event.why}")
        if not posted or envelope is None:
            return self, error

        less = _with_half(envelope.what) if event.too_large else None
        if less is not None:
            return self.described(envelope.seq, less), None
        if isinstance(envelope.what, Close):
            # Even this message is refused: there is nothing less to send.
            return evolve(self, envelopes=()), error

        # Better to end the job than to have a round wait without end for a message that no store
        # accepts.
        close = fitting(Close(node, f"the store refused a message of node {node}: {event.why}"))
        return self.described(envelope.seq, close), error

    def sent(self, seq: int, now: float) -> Self:
        """Note that message *seq* is being sent."""
        # Only the first attempt to send a request for ranks counts.
        is_first_attempt = seq == self.join_seq and self.join_sent is None
        if not is_first_attempt:
            return self
        return evolve(self, join_sent=now)

    def done(self, seq: int) -> Self:
        """Note that message *seq*, which was the next one, is in the store."""
        # It may have been there before, if it was sent again.
        late = self._late_without({seq})
        if seq == self.join_seq:
            late = _since_last_join(late)
        late += self.envelopes[:1]
        return evolve(self, envelopes=self.envelopes[1:], stored=max(seq, self.stored), late=tuple(late))

    def again(self, seen: Seen, *, all_late: bool = False) -> Self:
        """
        Return the outbox with the last request for ranks once more, in case the coordinator does
        not know it.

        With *all_late*, the other late messages are included: the store itself may have been lost.
        They keep their numbers, and have no effect on a coordinator that knows them. The request
        for ranks contains what this node knows of the job.
        """
        waiting = {each.seq for each in self.envelopes}
        if self.join is None or not self.has_joined or self.join_seq in waiting:
            return self

        join = evolve(self.join, round=seen.round, epoch=seen.epoch, pulse=seen.heartbeat_count)
        repeated = [Written(self.join_seq, join)]
        if all_late:
            repeated += self._late_without({*waiting, self.join_seq})
        # In the order of their numbers: a gap would mean that a message was lost on the way.
        repeated.sort(key=lambda message: message.seq)
        return evolve(self, envelopes=(*repeated, *self.envelopes))

    def _late_without(self, numbers: Collection[int]) -> list[Written]:
        """Return the late messages, except those with these *numbers*."""
        return [each for each in self.late if each.seq not in numbers]


def _since_last_join(messages: Sequence[Written]) -> list[Written]:
    """Return the last request for ranks and the messages after it; none without such a request."""
    joins = [each.seq for each in messages if isinstance(each.what, Join)]
    if not joins:
        return []
    last = max(joins)
    return [each for each in messages if each.seq >= last]


def _with_half(what: Report | Describe) -> Report | None:
    """Return a report on failures in half of its bytes; None for one that cannot be shortened any more."""
    if not isinstance(what, (Failed, Stopped)):
        return None
    size = len(encode(what))
    less = fitting(what, size // 2)
    return less if len(encode(less)) < size else None
