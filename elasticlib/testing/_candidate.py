"""
A simulated candidate: a node that coordinates for as long as it holds the store's lease.

Rules of this file: it mirrors what `rendezvous._election` and `rendezvous._station` do with a lease; who holds it is
decided by the store alone.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from elasticlib.testing._host import Host
from elasticlib.testing._store import Connection, Link, Store
from elasticlib.testing._timeline import Process, Timeline

AGAIN = 0.5
"""Seconds between two campaigns of one node."""


@define(eq=False, repr=False)
class Candidate:
    """A node that coordinates whenever nobody else does."""

    name: str
    process: Process
    link: Link
    timeline: Timeline
    store: Store
    make: Callable[[int, Callable[[str], None]], Host]
    """A host for a term of office; it calls what it is given when it stops."""
    seconds: float
    done: Callable[[], bool]
    """Whether the job is over for this node, and nobody is left to be told."""
    closing: bool = False
    gone: Callable[[], None] = lambda: None
    host: Host | None = None
    _connection: Connection | None = None
    _term: int | None = None
    _kept_at: float = 0.0

    def start(self) -> None:
        """Ask for the lease."""
        if not self.closing:
            self._connection = self.store.connect(self.process, self.link, self._campaign, self._broke)

    def close(self, linger: float) -> None:
        """Coordinate no more, once the end is read where it has come; then call `gone`."""
        self.closing = True
        if self.host is None:
            self._resign()
        else:
            self.host.close(linger if self.host.server.is_over() else 0.0)

    def _campaign(self, connection: Connection) -> None:
        connection.call("campaign", self.name, self.seconds, then=self._elected)

    def _elected(self, term: int) -> None:
        self._term, self._kept_at = term, self._clock()
        if self.closing:
            self._resign()
            return
        if self.done():
            self._again()
            return
        self.host = self.make(term, self._stopped)
        self.host.start()
        self._keep(term)

    def _clock(self) -> float:
        return self.process.clock(self.timeline.now)

    def _keep(self, term: int) -> None:
        host = self.host
        if self._term != term or host is None or self._connection is None:
            return
        if self._clock() >= self._kept_at + self.seconds:
            host.stop("the lease could not be kept")
            return
        sent = self._clock()

        def kept(held: bool) -> None:
            if held:
                self._kept_at = sent
            elif not host.over:
                host.stop("the lease is over")

        self._connection.call("keep", term, self.seconds, then=kept)
        soon = self.process.moment(self._clock() + self.seconds / 3)
        self.timeline.at(soon, self.process, lambda: self._keep(term))

    def _stopped(self, why: str) -> None:
        self.host = None
        if self.closing:
            self._resign()
        else:
            self._again()

    def _broke(self, why: str) -> None:
        if self.host is not None:
            self.host.stop(why)
        else:
            self._again()

    def _again(self) -> None:
        if self._connection is not None:
            if self._term is not None and self._connection.open:
                self._connection.call("resign", self._term, then=lambda _: None)
            self._connection.close()
        self._connection, self._term = None, None
        self.timeline.after(AGAIN, self.process, self.start)

    def _resign(self) -> None:
        connection, term = self._connection, self._term
        if connection is not None and connection.open:
            if term is not None:
                connection.call("resign", term, then=lambda _: None)
            connection.close()
        self._connection, self._term = None, None
        self.gone()
