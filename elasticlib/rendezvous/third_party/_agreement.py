"""
The agreement of nodes that a third-party handler brought together: ranks, ends and the outcome,
through its store.

    elasticlib/call                    nonce of the present round, by its rank 0
    elasticlib/<nonce>/offer/<rank>    a node's description, and its knowledge of the job
    elasticlib/<nonce>/seat/<node>     its ranks, written by rank 0
    elasticlib/<nonce>/ends, ended     number of nodes that tried to end it; the first `RoundEnd`
    elasticlib/<nonce>/done, heard     nodes whose workers succeeded; nodes that know how the job ended
    elasticlib/<nonce>/gone/<rank>     after the last restart: the failures on that node, now that its workers are gone
    elasticlib/<nonce>/final           the outcome, by the node that ended the round

Rules of this file: the store only needs `set`, `get`, `add` and `check`, and no call of it may wait
for a key. The store may be the same for every round, with all its old values. So this round's nonce
is part of the keys that are read, and a node follows the call whenever it changes. A failure's time
is the judge's own clock less the age that its node reported. All nodes accept the judge's outcome;
a node that gets none in time reports its own knowledge.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import Factory, define, frozen

from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous.coordinator._rank_order import assign
from elasticlib.rendezvous.protocol._messages import (
    FailureNote,
    Final,
    Join,
    RankAssignment,
    RoundEnd,
    Stopped,
    decode,
    encode,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

_ROOT = "elasticlib"
_CALL = f"{_ROOT}/call"
_OFFER = re.compile(rb"(-1|[0-9]{1,18}) ([0-9]{1,18}) (.*)", re.DOTALL)
TIMEOUT = 45.0
"""Seconds that a judge waits until the workers of all nodes are gone: more than a stop takes by default."""
_GRACE = 15.0
"""Seconds more that the other nodes wait, until the judge's outcome has reached the store."""


@frozen
class Past:
    """A node's knowledge of the job so far."""

    round: int = -1
    """Number of the node's last round."""
    restarts: int = 0
    """Restarts of the job, including the node's own last request."""
    nonce: str = ""
    """Nonce of the last round."""


@define
class Agreement:
    """One node's part in the agreement, in the round in which it has *rank* of *size*."""

    store: Store
    """torch's store, or another object with the methods used here."""
    rank: int
    size: int
    guard: Callable[[Callable[[], Any]], Any]
    """Makes each call to the store, so that a call that does not return is noticed."""
    nonce: str = ""
    _assigned: bool = False

    def meet(self, join: Join, past: Past, max_restarts: int) -> RankAssignment | None:
        """
        Return the ranks of the node with request *join*, or None; call it again until there are
        ranks.
        """
        if self.rank == 0:
            self._call_round(join, past)
            self._assigned = self._assigned or self._assign(max_restarts)
        else:
            self._follow(join, past)

        if not self.nonce:
            # Rank 0 has not called the round yet.
            return None

        assignment = self.read(RankAssignment, f"seat/{join.node}")
        if assignment is None:
            return None

        # Two rounds of the handler may share one store: ranks of the other one would mix the groups.
        if (assignment.group_rank, assignment.group_world_size) != (self.rank, self.size):
            raise RendezvousStateError(
                f"the rendezvous handler gave node {join.node} rank {self.rank} of {self.size}, but the node with "
                f"rank 0 assigned it rank {assignment.group_rank} of {assignment.group_world_size}"
            )

        return assignment

    def _call_round(self, join: Join, past: Past) -> None:
        if self.nonce:
            return
        self.nonce = uuid.uuid4().hex
        self._describe_node(join, past)
        self._store(_CALL, self.nonce.encode())

    def _follow(self, join: Join, past: Past) -> None:
        if not self._guarded(lambda: self.store.check([_CALL])):
            return
        nonce = bytes(self._guarded(lambda: self.store.get(_CALL))).decode(errors="replace")
        # The store may be the same for each round, with the last round's call in it.
        if nonce not in (self.nonce, past.nonce):
            self.nonce = nonce
            self._describe_node(join, past)

    def _describe_node(self, join: Join, past: Past) -> None:
        self._set(f"offer/{self.rank}", f"{past.round} {past.restarts} ".encode() + encode(join))

    def _assign(self, max_restarts: int) -> bool:
        """Give all nodes their ranks if all offers exist; return whether they do."""
        keys = [f"offer/{rank}" for rank in range(self.size)]
        if not self._there(keys):
            return False

        pasts, joins = [], []
        for key in keys:
            past, join = _offer(self._get(key))
            pasts.append(past)
            joins.append(join)

        # A node may be new, or have missed rounds: the one that knows most is right.
        number = max(past.round for past in pasts) + 1
        restarts = max(past.restarts for past in pasts)
        why = f"all {self.size} nodes of the handler's round have joined"
        descriptors = [join.descriptor for join in joins]
        assignments = assign(descriptors, number, restarts, max_restarts, why)
        for join, assignment in zip(joins, assignments, strict=True):
            self._set(f"seat/{join.node}", encode(assignment))
        return True

    def end(self, round_end: RoundEnd) -> bool:
        """End the round with this reason; return False if another node has ended it before."""
        # The store counts atomically: of several nodes that end the round, one is the first.
        if self._add("ends", 1) != 1:
            return False
        self._set("ended", encode(round_end))
        return True

    def ended(self) -> RoundEnd | None:
        """Return the end of the round; None while no node has ended it."""
        return self.read(RoundEnd, "ended")

    def report_failures(self, stopped: Stopped) -> None:
        """Report that no worker is left here, with the failures."""
        self._set(f"gone/{self.rank}", encode(stopped))

    def judge(self, final: Final) -> None:
        """Publish the job's outcome; only for the node whose `end` was the first."""
        self._set("final", encode(final))

    def count_done(self, one: int = 0) -> int:
        """Return the number of nodes whose workers succeeded; *one* is added first."""
        return self._add("done", one)

    def count_informed(self, one: int = 0) -> int:
        """Return the number of nodes that know how the job ended; *one* is added first."""
        return self._add("heard", one)

    def read(self, kind: type[T], key: str) -> T | None:
        """Return the message at *key* in this round; None before it is written."""
        if not self._there([key]):
            return None
        message = decode(self._get(key))
        if not isinstance(message, kind):
            raise RendezvousStateError(
                f"the store key {key} holds a {type(message).__name__} instead of a {kind.__name__}"
            )
        return message

    def _key(self, key: str) -> str:
        return f"{_ROOT}/{self.nonce}/{key}"

    def _there(self, keys: Sequence[str]) -> bool:
        return bool(self._guarded(lambda: self.store.check([self._key(key) for key in keys])))

    def _get(self, key: str) -> bytes:
        return bytes(self._guarded(lambda: self.store.get(self._key(key))))

    def _set(self, key: str, value: bytes) -> None:
        self._store(self._key(key), value)

    def _store(self, key: str, value: bytes) -> None:
        self._guarded(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # torch's takes bytes, too

    def _add(self, key: str, amount: int) -> int:
        return int(self._guarded(lambda: self.store.add(self._key(key), amount)))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return self.guard(call)
        # A third party's store may raise anything.
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RendezvousConnectionError(f"the store of the rendezvous handler failed: {why}") from error


def _offer(data: bytes) -> tuple[Past, Join]:
    if (found := _OFFER.fullmatch(data)) is None:
        raise RendezvousStateError(f"the store holds {data[:80]!r} instead of the description of a node")
    past = Past(int(found[1]), int(found[2]))
    join = decode(found[3])
    if not isinstance(join, Join):
        raise RendezvousStateError(f"the store holds a {type(join).__name__} instead of the description of a node")
    return past, join


def end_of_round(node: str, notes: tuple[FailureNote, ...], past: Past, max_restarts: int) -> RoundEnd:
    """
    Return the end of the present round by *node*, whose workers failed as in the *notes*; without
    any, it stopped them itself.
    """
    if not notes:
        return RoundEnd(past.round, f"node {node} stopped its workers", True)
    # The likeliest root cause: the oldest failure, but for a lost connection.
    why = describe(node, min(notes, key=lambda note: (note.secondary, -note.age)))
    if any(note.fatal for note in notes):
        return RoundEnd(past.round, f"{why}; a restart would fail again", False)
    if past.restarts >= max_restarts:
        return RoundEnd(past.round, f"{why}; no restart is left", False)
    return RoundEnd(past.round, f"{why}; restart {past.restarts + 1} of {max_restarts}", True)


@define
class SuccessCount:
    """One node's wait, after its own workers succeeded, for those of all other nodes."""

    table: Agreement
    round: int
    deadline: float
    """End of the wait, in seconds of the clock whose time `outcome` gets."""
    limit: float
    """Length of the wait in seconds, for the text."""
    is_complete: bool = False
    """True once all nodes succeeded."""

    def outcome(self, now: float) -> Final | None:
        """Return the success of the job once all nodes succeeded, or the time for that is over."""
        done = self.table.count_done()
        if done >= self.table.size:
            self.is_complete = True
            return Final(True, f"all {done} nodes succeeded", round=self.round)

        if now < self.deadline:
            return None

        # As after torch's exit barrier: a node that waits in vain ends by its own success.
        why = f"{done} of {self.table.size} nodes succeeded, and no other reported a failure for {self.limit:g} s"
        return Final(True, why, round=self.round)


@define
class FailureCollection:
    """One node's collection of failures, from the end of its own workers."""

    table: Agreement
    judges: bool
    why: str
    """The reason for the end of the round, as far as it was known then."""
    began: float
    """Start, in seconds of the clock whose time `outcome` gets."""
    _causes: list[tuple[float, str, FailureNote]] = Factory(list)
    _known: set[int] = Factory(set)

    def report_failures(self, stopped: Stopped) -> None:
        """Report the failures on this node."""
        self._note_end(self.table.rank, stopped, self.began)
        self.table.report_failures(stopped)

    def outcome(self, now: float) -> Final | None:
        """Return the end of the job, once that is settled."""
        if self.judges:
            return self._judge(now)

        final = self.table.read(Final, "final")
        if final is not None:
            return final

        is_late = now >= self.began + TIMEOUT + _GRACE
        if is_late:
            # The judge is gone: each node reports its own knowledge.
            return self._final()

        return None

    def _judge(self, now: float) -> Final | None:
        """Return the outcome for all nodes, once all have reported or the time for that is over."""
        self._hear_others(now)
        is_late = now >= self.began + TIMEOUT
        if len(self._known) < self.table.size and not is_late:
            return None
        final = self._final()
        self.table.judge(final)
        return final

    def _hear_others(self, now: float) -> None:
        for rank in set(range(self.table.size)) - self._known:
            stopped = self.table.read(Stopped, f"gone/{rank}")
            if stopped is not None:
                self._note_end(rank, stopped, now)

    def _note_end(self, rank: int, stopped: Stopped, now: float) -> None:
        self._known.add(rank)
        self._causes += [(now - note.age, stopped.node, note) for note in stopped.failures]

    def _final(self) -> Final:
        if not self._causes:
            return Final(False, self.why)
        _, node, note = min(self._causes, key=_likelihood)
        why = "a restart would fail again" if note.fatal else "no restart is left"
        return Final(False, f"{describe(node, note)}; {why}", node, note)


def _likelihood(cause: tuple[float, str, FailureNote]) -> tuple[bool, float, str, int]:
    """Return a sort key, the likeliest root cause first: the earliest failure, but for a lost connection."""
    at, node, note = cause
    return note.secondary, at, node, note.rank


def describe(node: str, note: FailureNote) -> str:
    """Return a failure in one line."""
    if note.process:
        return f"{note.message} on node {node}"
    return f"rank {note.rank} of node {node} failed: {note.message}"
