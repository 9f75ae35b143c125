"""
A simulated store and the network to it.

Rules of this file: a connection carries its requests and answers in order and each after a delay; what is on its
way when the connection breaks is lost, acknowledged or not; what is on its way when a link is cut arrives after
the link is back, even if its sender has given up on it. The store does what the contract of `Exchange` says, plus
a lease and one document for the state log of a coordinator that may be any node, and counts what it is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import Factory, define, field, frozen

from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, Posted
from elasticlib.testing import DeleteLeader, PauseStore, SetBack
from tests.sim.simulator.adversary import INBOX, Adversary
from tests.sim.simulator.network import Link, Network, Way
from tests.sim.simulator.timeline import Process

Then = Callable[[Any], None]
REFUSED = object()
"""Answer to whoever writes more than the store takes."""
LOST = object()
"""Answer to whoever writes with a lease that is over."""
CHANGED = object()
"""Answer to whoever saves what somebody else has written since."""
DESTROYED = object()
"""Answer to whoever asks for something that is there no more, and must be."""
LEADER = "leader"
"""Place at which requests wait for changes of the lease."""
_MOST_NEW = 100_000
"""Entries that may be new at once."""


@frozen
class Later:
    """Answer of the store that comes once something happens at that *place*."""

    place: str
    answer: Callable[[], Any]


@define(eq=False, repr=False)
class Use:
    """Use of the store: calls, the keys and entries that they touched, and bytes if counted."""

    calls: Counter[str] = Factory(Counter)
    touched: int = 0
    bytes: int = 0
    longest: Counter[str] = Factory(Counter)
    """By kind of call, the bytes of the longest value."""

    def count(self, kind: str, arguments: Sequence[Any], values: Mapping[str, Any]) -> None:
        """One call more, to a store that holds *values*."""
        self.calls[kind] += 1
        first: Any = arguments[0] if arguments else None
        if kind == "write":
            self.touched += len(first)
            self.bytes += sum(len(key) + len(value) for key, value in first.items())
        elif kind in ("read", "delete", "discard"):
            self.touched += len(first)
            self.bytes += sum(len(str(key)) for key in first)
            self.bytes += sum(len(values.get(key) or b"") for key in first) if kind == "read" else 0
        elif kind != "receive":
            self.touched += 1
            self.bytes += size_of(kind, arguments) or (len(first) if isinstance(first, str) else 0)


def size_of(kind: str, arguments: Sequence[Any]) -> int:
    """Bytes of the largest value that the call writes."""
    if kind == "write":
        return max(map(len, arguments[0].values()), default=0)
    if kind == "save":
        return len(arguments[1].data)
    return len(arguments[0]) if kind == "post" else 0


@define(eq=False, repr=False)
class Connection:
    """One client's connection; *on_break* is called once if it breaks, and never after `close`."""

    store: Store
    client: Process
    link: Link
    on_break: Callable[[str], None]
    open: bool = True
    """The client's side: whether answers are still wanted."""
    is_refused: bool = False
    """True once it is known that no server listens there."""
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
                timeline = self.client.timeline
                timeline.after(0.0, self.store.process, lambda: self.store.handle(self, kind, arguments, answer))
            else:  # the kernel of a machine that lives answers for a process that does not
                self.back.send(self.client, lambda: self.reset("connection reset by peer"))

        if self.open:
            self.there.send(None, arrive)

    def close(self) -> None:
        """Want no answer any more; what was sent may still arrive."""
        self.open = False
        self._forget()

    def refuse(self) -> None:
        """It never opens, for no server listens there."""
        self.is_refused = True
        self.reset("connection refused")

    def reset(self, why: str) -> None:
        """It breaks now, and everything on its way is lost."""
        self.there.queue.clear()
        self.back.queue.clear()
        if self.open:
            self.open = False
            self._forget()
            self.client.timeline.after(0.0, self.client, lambda: self.on_break(why))

    def _forget(self) -> None:
        for link in (self.link, self.store.link):
            if self in link.connections:
                link.connections.remove(self)


@frozen
class Lease:
    """Office of the coordinator: its holder, its term and its end."""

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
    """True if `use` is kept."""
    most: int = 0
    """Bytes that one value may have; 0: any number."""
    values: dict[str, bytes] = Factory(dict)
    inbox: dict[int, bytes] = Factory(dict)
    posted: int = 0
    use: Use = Factory(Use)
    lease: Lease | None = None
    terms: int = 0
    changes: int = 0
    """Number of times that the lease was taken or ended."""
    document: Any = None
    has_election: bool = False
    """True if the holder of the lease coordinates; else an inbox is entries and their counter."""
    adversary: Adversary | None = None
    """Adversary that reads every written value, if there is one."""
    scribbled: bool = False
    """True if another writer has changed the document since it was loaded or saved."""
    purges: int = 0
    """Number of times that a job was deleted from the store."""
    on_save: Callable[[Any], None] = lambda document: None
    on_write: Callable[[str, bytes], None] | None = None
    """Hears of each value that one of the job's own wrote."""
    _waiters: dict[str, list[tuple[Connection, Callable[[], None]]]] = Factory(dict)
    """Callbacks for the next event at a key or at another place."""

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
                connection.back.send(client, connection.refuse)

        connection.there.send(None, knock)
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
            and not self._has_lease(connection.term)
        ):
            answer(LOST)
            return
        if self.counts or self.most:
            size = size_of(kind, arguments)
            self.use.longest[kind] = max(self.use.longest[kind], size)
            if 0 < self.most < size:
                answer(REFUSED)
                return
        result = getattr(self, f"_{kind}")(connection, *arguments)
        if isinstance(result, Later):
            waiting = self._waiters.setdefault(result.place, [])
            waiting.append((connection, lambda: answer(result.answer())))
        else:
            answer(result)

    def _wake(self, place: str) -> None:
        for connection, do in self._waiters.pop(place, ()):
            if connection.open:
                do()

    def _post(self, _: Connection, data: bytes) -> None:
        if self.adversary is not None:
            self.adversary.saw(INBOX, data)
        self.append(data)

    def append(self, data: bytes) -> None:
        """Add an entry to the inbox."""
        self.posted += 1
        self.inbox[self.posted] = data
        self._wake(INBOX)

    def _receive(self, connection: Connection) -> Any:
        if self.posted != connection.received:
            return self._news(connection)
        return Later(INBOX, lambda: self._news(connection))

    def _news(self, connection: Connection) -> Any:
        if not connection.received <= self.posted < connection.received + _MOST_NEW:
            return DESTROYED
        new = range(connection.received + 1, self.posted + 1)
        first = min(self.inbox, default=self.posted + 1)
        found = [Posted(number, self.inbox[number]) for number in new if number >= first and number in self.inbox]
        connection.received = self.posted
        if self.counts:
            self.use.touched += len(found)
            self.use.bytes += sum(len(each.data) for each in found)
        return found

    def _discard(self, _: Connection, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.inbox.pop(number, None)

    def _write(self, _: Connection, values: Mapping[str, bytes]) -> None:
        for key, data in values.items():
            if self.adversary is not None:
                self.adversary.saw(key, data)
            if self.on_write is not None:
                self.on_write(key, data)
            self.put(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Write a value, wake all who wait for its key."""
        self.values[key] = data
        self._wake(key)

    def _read(self, _: Connection, keys: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def _wait(self, _: Connection, key: str) -> bool | Later:
        return key in self.values or Later(key, lambda: True)

    def _delete(self, _: Connection, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def _purge(self, _: Connection) -> None:
        self.values.clear()
        self.inbox.clear()
        self.document = None
        self.purges += 1

    # --- the lease and the state log

    def _look(self, _: Connection) -> tuple[int, bool]:
        return self.changes, self.lease is not None

    def _changed(self, _: Connection, since: int) -> Later | None:
        return Later(LEADER, lambda: None) if self.changes == since else None

    def _seize(self, _: Connection, name: str, seconds: float) -> int | None:
        return self._appoint(name, seconds) if self.lease is None else None

    def _renew(self, _: Connection, term: int, seconds: float) -> bool:
        if self.lease is not None and self.lease.term == term:
            self.lease = Lease(self.lease.holder, term, self.network.timeline.now + seconds)
            self._watch_lease(self.lease)
        return self._has_lease(term)

    def _release(self, _: Connection, term: int) -> None:
        if self._has_lease(term):
            self.delete_leader()

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

    def steal_lease(self, seconds: float) -> None:
        """Somebody takes the office who does not coordinate."""
        self._appoint("nobody", seconds)

    def _appoint(self, name: str, seconds: float) -> int:
        self.terms += 1
        self._let(Lease(name, self.terms, self.network.timeline.now + seconds))
        return self.terms

    def _let(self, lease: Lease | None) -> None:
        self.lease = lease
        self.changes += 1
        self._wake(LEADER)
        if lease is not None:
            self._watch_lease(lease)

    def _load(self, _: Connection) -> Any:
        self.scribbled = False
        there = self.document is not None and self.document.data
        return DESTROYED if not there and ANNOUNCEMENT in self.values else self.document if there else None

    def _save(self, _: Connection, term: int, document: Any) -> Any:
        if not self._has_lease(term):
            return False
        if self.scribbled:
            self.scribbled = False
            return CHANGED
        self.document = document
        if self.adversary is not None:
            self.adversary.saw_document(document)
        self.on_save(document)
        return True

    def _has_lease(self, term: int) -> bool:
        return self.lease is not None and self.lease.term == term

    def _watch_lease(self, lease: Lease) -> None:
        def over() -> None:
            if self.lease == lease:
                self.delete_leader()

        self.network.timeline.at(lease.until, self.process, over)
