"""
Rules of a node's messages to its coordinator, under any failure in between.

Each report makes one message, numbered in the order of the agent's reports. A message is posted
when its predecessor is in the store, and a repeated post has the same text. A stored message is not
posted again, except the last request for ranks, if the coordinator may not know it. No message
exceeds the size limit. If the store denies a message for its size, a shorter one replaces it, or
the node reports that the job cannot continue.
"""

from __future__ import annotations

from attrs import Factory, define, evolve

from elasticlib.rendezvous.protocol._exchange import report_place
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Close,
    Descriptor,
    Envelope,
    Failed,
    Join,
    Report,
    Stopped,
    Terms,
    decode,
)
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._shortening import EARLY, ENVELOPE
from tests.sim.checks.demand import Demand


@define(eq=False, repr=False)
class Envelopes:
    """Of one node."""

    job: str
    node: str
    key: bytes | None
    terms: Terms | None
    demand: Demand
    last: int = 0
    """Number of the last one that there must be."""
    stored: int = 0
    """Number of the last one that is in the store."""
    join_seq: int = 0
    """Number of the last one that asks for ranks."""
    requested_at: float | None = None
    """When that was posted first."""
    _due: dict[int, Report | None] = Factory(dict)
    """Required report of each message not yet in the store; None: a request not yet described."""
    _join: Join | None = None
    """Content of the last request for ranks, once it is described."""
    _posted: dict[int, bytes] = Factory(dict)
    """Posted messages that are not known to be in the store."""
    _denied: dict[int, int] = Factory(dict)
    """Bytes of those that the store did not take."""
    _failed: Failed | Stopped | None = None
    """The last failures that were said."""
    _whole: int = -1
    """The round of whose failures all is to be said."""
    _again: dict[int, Join] = Factory(dict)
    """Wishes that are said once more, and what they say then."""

    # What is to be said.

    def wants(self) -> None:
        """The agent asks for ranks."""
        self._add(None)
        self.join_seq, self.requested_at, self._join = self.last, None, None

    def reports(self, report: Report) -> None:
        """The agent says something."""
        self._add(report)
        if isinstance(report, (Failed, Stopped)) and report.failures:
            self._failed = report

    def ends(self) -> None:
        """The session has read how the job ended."""
        self._add(Acknowledgement(self.node))

    def elaborates(self, round: int) -> None:
        """The coordinator wants to know all about the failures of that round."""
        self._whole = round
        if self._failed is not None and self._failed.round == round:
            self._add(Failed(self.node, round, self._failed.failures))

    def described(self, made: Descriptor, seen: Seen) -> None:
        """It is known what the node brings."""
        seq = self.stored + 1
        join = Join(self.node, made, self.terms, seen.round, seen.epoch, seen.heartbeat_count)
        self._due[seq] = join
        if seq == self.join_seq:
            self._join = join

    def repeats(self, seen: Seen) -> None:
        """The coordinator may not know the request: it is said once more, if that is not being done already."""
        if self._join is not None and self.has_joined and self.join_seq not in self._again:
            self._again[self.join_seq] = evolve(
                self._join, round=seen.round, epoch=seen.epoch, pulse=seen.heartbeat_count
            )

    def _add(self, report: Report | None) -> None:
        self.last += 1
        self._due[self.last] = report

    @property
    def is_left(self) -> bool:
        """Return whether a message remains to be sent."""
        return self.stored < self.last or bool(self._again)

    @property
    def has_joined(self) -> bool:
        """Return whether the last request to join is in the store."""
        return 0 < self.join_seq <= self.stored

    # What is said.

    def describes(self) -> None:
        """Check that the node's descriptor is requested only for a request to join."""
        seq = self.stored + 1
        self.demand(seq in self._due and self._due[seq] is None, "it is asked what the node brings, for no wish")

    def post(self, data: bytes, nonce: str, now: float) -> int:
        """A message goes out; its number."""
        envelope = decode(
            data, self.key, lambda each: report_place(self.job, nonce, self.node, getattr(each, "seq", 0))
        )
        assert isinstance(envelope, Envelope)
        seq, report = envelope.seq, envelope.report
        self.demand(len(data) <= ENVELOPE, f"message {seq} has {len(data):,} bytes")
        self.demand(report.node == self.node, f"message {seq} is from {report.node}")
        if seq <= self.stored:
            self.demand(seq in self._again, f"message {seq} is posted again")
            due = self._again[seq]
            self.demand(report == due, f"message {seq} says {report} again, and should say {due}")
            return seq
        self.demand(seq == self.stored + 1, f"message {seq} is posted though {self.stored} is the last in the store")
        self.demand(seq <= self.last, f"message {seq} is posted, and nobody said it")
        if seq in self._denied:
            less = isinstance(report, Close) or len(data) < self._denied[seq]
            self.demand(less, f"message {seq} is denied, and says {report} in its place")
        else:
            self.demand(self._posted.get(seq, data) == data, f"message {seq} is posted again in other words")
            self._is_due(seq, report, len(data))
        self._posted[seq] = data
        if seq == self.join_seq and self.requested_at is None:
            self.requested_at = now
        return seq

    def _is_due(self, seq: int, report: Report, size: int) -> None:
        due = self._due[seq]
        same = type(report) is type(due) and getattr(report, "round", None) == getattr(due, "round", None)
        if isinstance(report, Join):
            same = report == due
        self.demand(same, f"message {seq} says {report}, and should say {due}")
        if isinstance(report, (Failed, Stopped)) and report.round != self._whole:
            self.demand(size <= EARLY, f"message {seq} has {size:,} bytes about failures that nobody has asked for")

    def arrived(self, seq: int) -> None:
        """It is in the store."""
        self._again.pop(seq, None)
        self.stored = max(self.stored, seq)
        for each in (self._due, self._posted, self._denied):
            each.pop(seq, None)

    def denied(self, seq: int, too_large: bool) -> bool:
        """The store does not take it; whether less can perhaps be said in its place, and the node goes on."""
        data = self._posted.pop(seq)
        envelope = decode(data, None) if self.key is None else None
        report = envelope.report if isinstance(envelope, Envelope) else None
        if isinstance(report, Close):
            self._due.clear()
            self.stored = self.last
        self._denied[seq] = len(data)
        return too_large and isinstance(report, (Failed, Stopped))
