"""
A simulated candidate: the real `Candidacy`, on a simulated connection.

Rules of this file: it stands where the thread of `rendezvous.stores._election` and the node's runtime stand, and
decides as little as they do; who has the office is decided by the store alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field
from typing_extensions import assert_never

from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores import _candidacy as events
from elasticlib.rendezvous.stores._candidacy import Candidacy
from elasticlib.rendezvous.stores._keys import RenewedKey
from tests.sim.simulator.host import Host
from tests.sim.simulator.node import Node
from tests.sim.simulator.store import Connection, Store

AGAIN = 0.5
"""Seconds after which one in office begins again whose connection broke."""
CLOSING = 1.0
"""Seconds that one who closes waits for a coordinator that hangs in the store, besides those for others."""


@define(eq=False, repr=False)
class Candidate:
    """A node that coordinates whenever nobody else does."""

    node: Node
    store: Store
    on_stopped: Callable[[], None] = lambda: None
    host: Host | None = None
    _candidacy: Candidacy = field(init=False)
    _connection: Connection | None = None
    _pending: Callable[[events.Event], None] | None = None
    """Takes the answer to what is under way; None: nothing is."""
    _waits: bool = False
    """True if the operation in progress can be interrupted."""
    _rests: bool = False
    """True if the operation in progress is a pause, which requires no connection."""
    _over: events.Over | None = None
    """Outcome of the coordinator, if its term has not ended."""

    def start(self) -> None:
        """Stand for election."""
        ttl = max(2.0, self.node.cluster.rules.heartbeat / 2)
        self._candidacy = Candidacy(ttl)
        self._step(events.Done())

    def close(self, linger: float) -> None:
        """Coordinate no more, once the end is read where it has come; then call `on_stopped`."""
        host = self.host
        if host is None or host.over:
            self._close()
            return
        linger = linger if host.server.is_over() else 0.0
        host.close(linger)
        host.closes = self._close
        self.node.rendezvous.after(linger + CLOSING, self._close)

    def _close(self) -> None:
        if not self._candidacy.stopped:
            self._candidacy = self._candidacy.close()
            if self._pending is not None and self._waits:
                self._step(events.Done())

    def _step(self, event: events.Event) -> None:
        self._pending = None
        self._candidacy, actions = self._candidacy.step(event, self.node.rendezvous.clock())
        stopped = self._candidacy.stopped
        for action in actions:
            match action:
                case events.ConnectToStore(limit):
                    self._connect(limit)
                case events.Rest(seconds):
                    self._rest(seconds)
                case events.StepDown(why):
                    if self.host is not None:
                        self.host.stop(why)
                    self._over = None
                case events.ReleaseLeadership(hold):
                    if self._connection is not None:
                        self._connection.call("release", hold.born, then=lambda _: None)
                case events.Lead(hold):
                    self._lead(hold)
                case events.Keep() | Log():
                    pass
                case events.FindLeader():
                    self._call("look", then=lambda found: events.Found(*found))
                case events.Await(version, seconds):
                    self._call("changed", version, limit=seconds, then=lambda _: events.Done())
                case events.Acquire(ttl):
                    self._call("seize", self.node.name, ttl, then=lambda term: events.Acquired(self._key_of_term(term)))
                case events.Renew(hold):
                    self._call("renew", hold.born, hold.ttl, then=events.Renewed)
                case _:
                    assert_never(action)
        if stopped:
            if self._connection is not None:
                self._connection.close()
            self.on_stopped()

    def _key_of_term(self, term: int | None) -> RenewedKey | None:
        return (
            None if term is None else RenewedKey("leader", f"{self.node.name}/{term}", term, term, self._candidacy.ttl)
        )

    def _expect_answer(self, *, waits: bool = False, rests: bool = False) -> Callable[[events.Event], None]:
        """Something is under way; the first event that is given to the answer counts."""

        def answer(event: events.Event) -> None:
            if self._pending is answer:
                self._step(event)

        self._pending, self._waits, self._rests = answer, waits, rests
        return answer

    def _connect(self, limit: float) -> None:
        if self._connection is not None:
            self._connection.close()
        answer = self._expect_answer()
        line = self._connection = self.store.connect(
            self.node.rendezvous, self.node.member.link, lambda _: answer(events.Done()), self._broke
        )
        self.node.rendezvous.after(
            limit, lambda: answer(events.ConnectionBroke("no answer")) if line is self._connection else None
        )

    def _broke(self, why: str) -> None:
        self._connection = None
        if self._pending is not None and not self._rests:
            self._step(events.ConnectionBroke(why))

    def _call(
        self, kind: str, *arguments: Any, then: Callable[[Any], events.Event], limit: float | None = None
    ) -> None:
        """Ask the store; with a *limit* that is a wait, which is over then."""
        answer = self._expect_answer(waits=limit is not None)
        if self._connection is None:
            answer(events.ConnectionBroke("the connection was lost"))
            return
        late = events.ConnectionBroke("no answer") if limit is None else events.Done()
        self._connection.call(kind, *arguments, then=lambda result: answer(then(result)))
        self.node.rendezvous.after(limit or self._candidacy.ttl, lambda: answer(late))

    def _rest(self, seconds: float) -> None:
        answer = self._expect_answer(waits=True, rests=True)
        if self._over is not None:
            answer(self._over)
        else:
            self.node.rendezvous.after(seconds, lambda: answer(events.Done()))

    # What it coordinates.

    def _lead(self, hold: RenewedKey) -> None:
        answer = self._expect_answer()
        if self.node.member.is_over and self.store.document is None:
            answer(events.Declined("the job has already ended, and all its nodes have left"))
            return
        self._begin(hold)
        answer(events.Elected())

    def _begin(self, hold: RenewedKey) -> None:
        self._over = None
        self.host = self.node.cluster.new_host(self.node, self.store, lambda why: self._stopped(hold, why), hold.born)
        self.host.start()

    def _stopped(self, hold: RenewedKey, why: str) -> None:
        host, self.host = self.host, None
        if host is None or self._candidacy.hold is not hold:
            return
        if host.closes is not None:
            host.closes()
        elif host.broken:
            self.node.rendezvous.after(
                AGAIN, lambda: self._begin(hold) if self._candidacy.hold is hold and not self.host else None
            )
        else:
            self._over = events.Over(why, host.server.stopped)
            if self._pending is not None and self._rests:
                self._step(self._over)
