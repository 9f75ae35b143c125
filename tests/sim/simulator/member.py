"""
A simulated node's side of the rendezvous: the real `Session`, on simulated connections.

Rules of this file: it stands where `rendezvous.node._client` and its threads stand, and decides as little as they do:
what the session asks for is asked of the simulated store, and what comes back is told to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field
from typing_extensions import assert_never

from elasticlib._times import soonest
from elasticlib.errors import ConfigError, RendezvousError, StartError
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.node._identity import NodeIdentity
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_liveness import Limits, TimePassed
from elasticlib.rendezvous.protocol._messages import Descriptor, Terms
from elasticlib.rendezvous.protocol._operations import Delete, Log, Post, Read, Take, Update, Wait, Write
from tests.sim.simulator.network import Link
from tests.sim.simulator.store import REFUSED, Connection
from tests.sim.simulator.timeline import Process

if TYPE_CHECKING:
    from tests.sim.simulator.cluster import SimulatedCluster

FLAP = 60.0
"""Seconds that a node which lost its store seeks it again."""
TAKEN = 0.00005
"""Seconds until a process has noticed that something came for it."""
WHERE = "the simulated store"
SILENT = "the store did not answer: timed out"


@define(eq=False, repr=False)
class Line:
    """A connection with its two threads."""

    speak: Connection
    watch: Connection | None = None
    opened: bool = False
    watches: bool = False
    """True once its second connection is open."""
    wanted: Callable[[Connection], None] | None = None
    """Callback that makes the waiting request on the second connection once that is open."""

    def close(self) -> None:
        """Want no answer any more."""
        self.speak.close()
        if self.watch is not None:
            self.watch.close()


@define(eq=False, repr=False)
class NodeClient:
    """A node's membership. *tell* gets what its agent must know; *over* the error that ended its part."""

    name: str
    process: Process
    link: Link
    cluster: SimulatedCluster
    describe: Callable[[], Descriptor]
    notify: Callable[[MembershipEvent], None]
    over: Callable[[str], None]
    key: bytes | None
    stepped: Callable[[], object] = bool
    """Is called when the session may see its workers' end otherwise than before."""
    session: Session = field(init=False)
    _line: Line | None = None
    _wakes_at: float | None = None
    _taking: bool = False
    _ended: bool = False

    def start(self) -> None:
        """Begin to seek the job."""
        rules = self.cluster.rules
        limits = Limits(rules.join_limit, FLAP, 0.0, has_election=self.cluster.coordinator == "elected")
        terms = Terms(rules.min_nodes, rules.max_nodes, rules.max_restarts)
        identity = NodeIdentity("job", self.name, self.key)
        self.session, actions = Session.begin(identity, limits, self.process.clock(), terms, WHERE)
        self._observe(None, None, actions)
        self._perform(actions)
        self._set_alarm()

    @property
    def nonce(self) -> str:
        """The beginning of the job in which this node is; empty while it has found none."""
        return self.session.identity.nonce

    @property
    def is_over(self) -> bool:
        """Return whether the node has received the end of the job."""
        return self.session.final is not None

    # What the session wants.

    def handle(self, event: events.Event) -> None:
        """Something happened."""
        before, (self.session, actions) = self.session, self.session.step(event, self.process.clock())
        self._observe(event, before, actions)
        self._perform(actions)
        failed = self.session.error is not None and self.session.final is None and not self._ended
        if (self.session.unread or failed) and not self._taking:
            self._taking = True
            self.process.after(TAKEN, self._take)
        self._set_alarm()
        self.stepped()

    def _observe(self, event: events.Event | None, before: Session | None, actions: tuple[Any, ...]) -> None:
        if self.cluster.observer is not None:
            self.cluster.observer.stepped(self.name, event, before, self.session, actions, self.process.clock())

    def _take(self) -> None:
        self._taking = False
        if self.session.closed:
            return
        self.handle(TimePassed())
        before, (self.session, received) = self.session, self.session.drain()
        self._observe(None, before, received)
        for event in received:
            self.notify(event)
        if self.session.error is not None and self.session.final is None and not self._ended:
            self._ended = True
            self.over(str(self.session.error))

    def _set_alarm(self) -> None:
        when = soonest(self.session.wake_at(), self.session.speaks_at())
        if when is not None and (self._wakes_at is None or when < self._wakes_at):
            self._wakes_at = when
            self.process.at(when, lambda: self._alarm(when))

    def _alarm(self, shown: float) -> None:
        if self._wakes_at == shown:
            self._wakes_at = None
        when = soonest(self.session.wake_at(), self.session.speaks_at())
        if when is not None and self.process.clock() >= when:
            self.handle(TimePassed())
        else:
            self._set_alarm()

    def _perform(self, actions: tuple[events.Action, ...]) -> None:
        for action in actions:
            match action:
                case events.OpenConnection(number, limit):
                    self._connect(number, limit)
                case events.Ask():
                    self._request(action)
                case events.Disconnect():
                    if self._line is not None:
                        self._line.close()
                case Log():
                    pass
                case _:
                    assert_never(action)

    def _connect(self, number: int, limit: float) -> None:
        if self._line is not None:
            self._line.close()

        def opened(_: Connection) -> None:
            line.opened = True
            line.watch = self._open(number, watches)
            self.handle(events.Connected(number))

        def watches(watch: Connection) -> None:
            line.watches = True
            if line.wanted is not None:
                line.wanted(watch)

        def expire() -> None:
            if not line.opened:
                line.close()
                self.handle(events.ConnectionLost(number, SILENT))

        self._line = line = Line(self._open(number, opened))
        self.process.after(limit, expire)

    def _open(self, number: int, opened: Callable[[Connection], None]) -> Connection:
        def broke(why: str) -> None:
            self.handle(events.ConnectionLost(number, why, connection.is_refused))

        connection = self.cluster.dialled().connect(self.process, self.link, opened, broke)
        return connection

    def _request(self, request: events.Ask) -> None:
        line = self._line
        assert line is not None

        def answer(result: Any) -> None:
            if result is REFUSED:
                self.handle(events.Denied(request.connection, request.number, "the store cannot store more", True))
                return
            self.handle(events.OperationDone(request.connection, request.number, result))

        def describe() -> None:
            try:
                made = self.describe()
            except (RendezvousError, ConfigError, StartError) as error:
                self.handle(events.Refused(request.connection, error))
            else:
                answer(made)

        if isinstance(request.operation, events.Describe):
            self.process.after(0.0, describe)
        elif request.thread is events.ConnectionThread.SPEAK:
            self._call(line.speak, request.operation, answer)
        elif line.watch is not None and line.watches:
            self._call(line.watch, request.operation, answer)
        else:
            line.wanted = lambda watch: self._call(watch, request.operation, answer)

    def _call(self, connection: Connection, operation: Any, answer: Callable[[Any], None]) -> None:
        match operation:
            case Post(data, values) if values:
                self._in_turn(connection, (Post(data), Write(values)), answer)
            case Post(data):
                connection.call("post", data, then=answer)
            case Update(values, keys):
                self._in_turn(connection, (Write(values), *((Read(keys),) if keys else ())), answer)
            case Write(values):
                connection.call("write", values, then=answer)
            case Read(keys):
                connection.call("read", keys, then=answer)
            case Wait(key, timeout):
                connection.call("wait", key, then=answer)
                self.process.after(timeout, lambda: answer(False))  # unless it was answered before
            case Take(key, timeout):

                def read(there: Any) -> None:
                    if there is True:
                        connection.call(
                            "read", (key,), then=lambda found: answer(found if found is REFUSED else found[0])
                        )
                    else:
                        answer(there or None)

                connection.call("wait", key, then=read)
                self.process.after(timeout, lambda: answer(None))  # unless it was answered before
            case Delete(keys):
                connection.call("delete", keys, then=answer)

    def _in_turn(
        self, connection: Connection, operations: Sequence[Any], answer: Callable[[Any], None], found: Any = None
    ) -> None:
        """One after the other; the answer is what was read."""
        first, *rest = operations

        def go_on(result: Any) -> None:
            known = result if isinstance(first, Read) else found
            if rest and result is not REFUSED:
                self._in_turn(connection, rest, answer, known)
            else:
                answer(REFUSED if result is REFUSED else known)

        self._call(connection, first, go_on)
