"""
A simulated store and the network to it.

Rules of this file: a connection carries its requests and answers in order and each after a delay; what is on its
way when the connection breaks is lost, acknowledged or not; what is on its way when a link is cut arrives after
the link is back, even if its sender has given up on it. The store does what the contract of `Exchange` says, plus
a lease and one document for the state log of a coordinator that may be any node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import Factory, define, field, frozen

from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, Posted
from elasticlib.testing._adversary import INBOX, STATE, Adversary
from elasticlib.testing._faults import DeleteLeader, PauseStore, SetBack
from elasticlib.testing._network import Link, Network, Way
from elasticlib.testing._timeline import Process
from elasticlib.testing._use import Use, size_of

Then = Callable[[Any], None]
KERNEL = Process("kernel")
"""Takes what arrives at a machine, and is never frozen."""
REFUSED = object()
"""Answer to whoever writes more than the store takes."""
LOST = object()
"""Answer to whoever writes with a lease that is over."""
CHANGED = object()
"""Answer to whoever saves what somebody else has written since."""
DESTROYED = object()
"""Answer to whoever asks for something that is there no more, and must be."""
_MOST_NEW = 100_000
"""Entries that may be new at once."""


@define(eq=False, repr=False)
class Connection:
    """One client's connection; *on_break* is called once if it breaks, and never after `close`."""

    store: Store
    client: Process
    link: Link
    on_break: Callable[[str], None]
    open: bool = True
    """The client's side: whether answers are still wanted."""
    there: Way = field(init=False)
    back: Way = field(init=False)
    received: int = 0
    """Number of the last inbox entry that this connection was given."""
    term: int | None = None
    """Number of the lease without which this connection may change nothing."""

    def __attrs_post_init__(self) -> None:
        links = (self.link, self.store.link) if self.link is not self.store.link else (self.link,)
        self.there, self.back = Way(self.store.network, links), Way(self.store.network, links)
        self.link.connections.append(self)
        self.store.link.connections.append(self)

    def call(self, kind: str, *arguments: Any, then: Then) -> None:
        """Ask the store; *then* gets the answer, if one ever comes."""

        def answer(result: Any) -> None:
            self.back.send(self.client, lambda: then(result) if self.open else None)

        def arrive() -> None:
            if self.store.process.alive:
                timeline = self.store.network.timeline
                timeline.at(timeline.now, self.store.process, lambda: self.store.handle(self, kind, arguments, answer))
            else:  # the kernel of a machine that lives answers for a process that does not
                self.back.send(self.client, lambda: self.reset("connection reset by peer"))

        if self.open:
            self.there.send(KERNEL, arrive)

    def close(self) -> None:
        """Want no answer any more; what was sent may still arrive."""
        self.open = False
        self._forget()

    def reset(self, why: str) -> None:
        """It breaks now, and everything on its way is lost."""
        self.there.queue.clear()
        self.back.queue.clear()
        if self.open:
            self.open = False
            self._forget()
            timeline = self.store.network.timeline
            timeline.after(0.0, self.client, lambda: self.on_break(why))

    def _forget(self) -> None:
        for link in (self.link, self.store.link):
            if self in link.connections:
                link.connections.remove(self)


@frozen
class Lease:
    """Who coordinates."""

    holder: str
    term: int
    until: float


@define(eq=False, repr=False)
class Store:
    """The server."""

    process: Process
    link: Link
    network: Network
    counts: bool = False
    """Whether `use` is kept."""
    most: int = 0
    """Bytes that one value may have; 0: any number."""
    values: dict[str, bytes] = Factory(dict)
    inbox: dict[int, bytes] = Factory(dict)
    posted: int = 0
    waiters: dict[str, list[tuple[Connection, Then]]] = Factory(dict)
    receivers: list[tuple[Connection, Then]] = Factory(list)
    use: Use = Factory(Use)
    lease: Lease | None = None
    onlookers: list[tuple[Connection, Then]] = Factory(list)
    terms: int = 0
    changes: int = 0
    """How often the lease was taken, or ended."""
    document: Any = None
    elects: bool = False
    """Whether whoever has the lease coordinates; else an inbox is entries and their counter."""
    adversary: Adversary | None = None
    """Who reads all that is written, if anybody does."""
    scribbled: bool = False
    """Whether somebody else has written the document since it was loaded or saved."""
    purges: int = 0
    """How often a job was deleted from it."""
    on_save: Callable[[Any], None] = lambda document: None
    on_write: Callable[[str, bytes], None] | None = None
    """Hears of each value that one of the job's own wrote."""

    def connect(
        self, client: Process, link: Link, on_open: Callable[[Connection], None], on_break: Callable[[str], None]
    ) -> Connection:
        """A connection whose *on_open* is called once the store has answered; refused: *on_break*."""
        connection = Connection(self, client, link, on_break)

        def knock() -> None:
            # The kernel accepts for a process that is frozen, and refuses for one that is dead.
            if self.process.alive:
                connection.back.send(client, lambda: on_open(connection) if connection.open else None)
            else:
                connection.back.send(client, lambda: connection.reset("connection refused"))

        connection.there.send(KERNEL, knock)
        return connection

    def end(self) -> None:
        """The server's process is gone; its machine, if that lives, says so."""
        self.process.alive = False
        for connection in list(self.link.connections):
            if connection.store is self and connection.link.cut_until <= self.network.timeline.now:
                connection.reset("connection reset by peer")

    # --- what it is asked to do

    def handle(self, connection: Connection, kind: str, arguments: Sequence[Any], answer: Then) -> None:
        """Do what *kind* says; *answer* at once or later."""
        if self.counts:
            self.use.count(kind, arguments, self.values)
        if (
            connection.term is not None
            and kind in ("write", "delete", "discard", "purge")
            and not self._is_held(connection.term)
        ):
            answer(LOST)
            return
        if self.counts or self.most:
            size = size_of(kind, arguments)
            self.use.longest[kind] = max(self.use.longest[kind], size)
            if 0 < self.most < size:
                answer(REFUSED)
                return
        getattr(self, f"_{kind}")(connection, *arguments, answer)

    def _post(self, _: Connection, data: bytes, answer: Then) -> None:
        if self.adversary is not None:
            self.adversary.saw(INBOX, data)
        self.append(data)
        answer(None)

    def append(self, data: bytes) -> None:
        """Add an entry to the inbox."""
        self.posted += 1
        self.inbox[self.posted] = data
        receivers, self.receivers = self.receivers, []
        for connection, then in receivers:
            if connection.open:
                self._give(connection, then)

    def _receive(self, connection: Connection, answer: Then) -> None:
        if self.posted != connection.received:
            self._give(connection, answer)
        else:
            self.receivers.append((connection, answer))

    def _give(self, connection: Connection, answer: Then) -> None:
        if not connection.received <= self.posted < connection.received + _MOST_NEW:
            answer(DESTROYED)
            return
        new = range(connection.received + 1, self.posted + 1)
        first = min(self.inbox, default=self.posted + 1)
        found = [Posted(number, self.inbox[number]) for number in new if number >= first and number in self.inbox]
        connection.received = self.posted
        if self.counts:
            self.use.touched += len(found)
            self.use.bytes += sum(len(each.data) for each in found)
        answer(found)

    def _discard(self, _: Connection, numbers: Sequence[int], answer: Then) -> None:
        for number in numbers:
            self.inbox.pop(number, None)
        answer(None)

    def _write(self, _: Connection, values: Mapping[str, bytes], answer: Then) -> None:
        for key, data in values.items():
            if self.adversary is not None:
                self.adversary.saw(key, data)
            if self.on_write is not None:
                self.on_write(key, data)
            self.put(key, data)
        answer(None)

    def put(self, key: str, data: bytes) -> None:
        """Write a value, wake all who wait for its key."""
        self.values[key] = data
        for connection, then in self.waiters.pop(key, ()):
            if connection.open:
                then(True)

    def _read(self, _: Connection, keys: Sequence[str], answer: Then) -> None:
        answer([self.values.get(key) for key in keys])

    def _wait(self, connection: Connection, key: str, answer: Then) -> None:
        if key in self.values:
            answer(True)
        else:
            self.waiters.setdefault(key, []).append((connection, answer))

    def _delete(self, _: Connection, keys: Sequence[str], answer: Then) -> None:
        for key in keys:
            self.values.pop(key, None)
        answer(None)

    def _purge(self, _: Connection, answer: Then) -> None:
        self.values.clear()
        self.inbox.clear()
        self.document = None
        self.purges += 1
        answer(None)

    # --- the lease and the state log

    def _look(self, _: Connection, answer: Then) -> None:
        answer((self.changes, self.lease is not None))

    def _changed(self, connection: Connection, since: int, answer: Then) -> None:
        if self.changes != since:
            answer(None)
        else:
            self.onlookers.append((connection, answer))

    def _seize(self, _: Connection, name: str, seconds: float, answer: Then) -> None:
        if self.lease is not None:
            answer(None)
            return
        self.terms += 1
        self._let(Lease(name, self.terms, self.network.timeline.now + seconds))
        answer(self.terms)

    def _renew(self, _: Connection, term: int, seconds: float, answer: Then) -> None:
        if self.lease is not None and self.lease.term == term:
            self.lease = Lease(self.lease.holder, term, self.network.timeline.now + seconds)
            self._watch_lease(self.lease)
        answer(self._is_held(term))

    def _release(self, _: Connection, term: int, answer: Then) -> None:
        if self.lease is not None and self.lease.term == term:
            self.delete_leader()
        answer(None)

    def suffer(self, fault: PauseStore | SetBack | DeleteLeader) -> None:
        """Something happens to it, or somebody writes there who should not."""
        now = self.network.timeline.now
        match fault:
            case PauseStore(seconds=seconds):
                self.process.thaws_at = now + seconds
            case DeleteLeader():
                self.delete_leader()
            case SetBack(seconds=seconds):
                assert self.adversary is not None
                self.adversary.set_back(seconds)

    def delete_leader(self) -> None:
        """The key that says who coordinates goes."""
        self._let(None)

    def usurp(self, seconds: float) -> None:
        """Somebody takes the office who does not coordinate."""
        self.terms += 1
        self._let(Lease("nobody", self.terms, self.network.timeline.now + seconds))

    def _let(self, lease: Lease | None) -> None:
        self.lease = lease
        self.changes += 1
        onlookers, self.onlookers = self.onlookers, []
        for connection, then in onlookers:
            if connection.open:
                then(None)
        if lease is not None:
            self._watch_lease(lease)

    def _load(self, _: Connection, answer: Then) -> None:
        self.scribbled = False
        there = self.document is not None and self.document.data
        answer(DESTROYED if not there and ANNOUNCEMENT in self.values else self.document if there else None)

    def _save(self, _: Connection, term: int, document: Any, answer: Then) -> None:
        held = self._is_held(term)
        if held and self.scribbled:
            self.scribbled = False
            answer(CHANGED)
            return
        if held:
            self.document = document
            if self.adversary is not None:
                self.adversary.saw(STATE, document.data)
                self.adversary.saw_document(document)
            self.on_save(document)
        answer(held)

    def _is_held(self, term: int) -> bool:
        return self.lease is not None and self.lease.term == term

    def _watch_lease(self, lease: Lease) -> None:
        def over() -> None:
            if self.lease == lease:
                self.delete_leader()

        self.network.timeline.at(lease.until, self.process, over)
