"""
A simulated coordinator's host: the real `Server`, on a simulated connection.

Rules of this file: it stands where the thread of `rendezvous.node._coordinator_host` stands, and decides as little as
that: each action takes its time, so the process can die or be frozen between any two. With an election, what was
decided counts once it is saved, and it is saved by the holder of the lease only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, field, frozen
from typing_extensions import assert_never

from elasticlib.rendezvous.coordinator import _server_events as events
from elasticlib.rendezvous.coordinator._server import REFUSALS, Server
from elasticlib.rendezvous.coordinator._state import Heartbeats, JobState, Presence
from elasticlib.rendezvous.protocol._exchange import Posted
from elasticlib.rendezvous.protocol._operations import ClearForeign, Delete, Discard, Log, Read, Receive, Write
from elasticlib.rendezvous.protocol._progress import Seen
from tests.sim.simulator.node import Node
from tests.sim.simulator.store import CHANGED, DESTROYED, LOST, REFUSED, Connection, Store
from tests.sim.simulator.timeline import Process

if TYPE_CHECKING:
    from tests.sim.simulator.cluster import SimulatedCluster
    from tests.sim.simulator.network import Link


@frozen
class Saved:
    """State that a coordinator leaves to its successor."""

    nonce: str
    data: bytes
    way: tuple[JobState, ...] = ()
    """All states since the last saving: what was decided in them is told, too."""


@define(eq=False, repr=False)
class Observed:
    """Logic of the coordinator, with observers of its steps."""

    logic: Any
    saw: Callable[[JobState], None]
    counted: Callable[[JobState, JobState], None] | None
    """Gets the states before and after heartbeats were counted."""

    def step(self, state: JobState, event: Any, now: float) -> Any:
        """One step of the coordinator."""
        outcome = self.logic.step(state, event, now)
        if isinstance(event, Heartbeats) and self.counted is not None:
            self.counted(state, outcome[0])
        self.saw(outcome[0])
        return outcome

    def abandon(self, state: JobState, why: str, kind: str = "closed") -> Any:
        """The end of the job."""
        outcome = self.logic.abandon(state, why, kind)
        self.saw(outcome[0])
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logic, name)


@define(eq=False, repr=False)
class Uplink:
    """Network link of a server that is not a node."""

    link: Link


@define(eq=False, repr=False)
class Outside:
    """A server that coordinates the job and is not a node: it never dies."""

    cluster: SimulatedCluster
    rendezvous: Process
    member: Uplink
    name: str = "server"


@define(eq=False, repr=False)
class Host:
    """One node's turn as the coordinator, from its start until `stop` or until it may not go on."""

    node: Node | Outside
    store: Store
    nonce: str
    ended: Callable[[str], None]
    """Called once, when this turn is over, with the reason."""
    term: int | None = None
    """Number of the lease; None: nobody else can coordinate."""
    over: bool = False
    broken: bool = False
    """True if it ended because its connection broke: another host may continue in the same term."""
    closes: Callable[[], None] | None = None
    """Called when it is over, as it was closed."""
    server: Server = field(init=False)
    _connection: Connection = field(init=False)
    _wakes: Connection | None = None
    _requested: bool = False
    """True if the store has not answered a request for entries."""
    _rests: int | None = None
    """Number of the wait for entries that is under way."""
    _waits: int = 0
    _breaks: bool = False
    """True if the end was reported because of an error that cannot be repaired."""
    _arrived: list[Posted] = Factory(list)
    _way: list[JobState] = Factory(list)
    _watched: tuple[Presence, ...] = ()
    """Nodes to which it is connected to notice their end."""

    def __attrs_post_init__(self) -> None:
        cluster, node = self.node.cluster, self.node
        logic = Observed(cluster.logic, self._saw, cluster.trust.of_a_term() if cluster.trust else None)
        seen = node.member.session.seen if isinstance(node, Node) and self.term is not None else Seen()
        state, journaled = JobState(cluster.rules), self.term is not None
        self.server = Server("job", node.name, cluster.key, self.nonce, state, journaled, seen=seen, logic=logic)

    def start(self) -> None:
        """Begin to answer."""
        self._connection = self._connect(lambda _: self._begin(), self._broke)
        self._connection.term = self.term

    def _connect(self, opened: Callable[[Connection], None], broke: Callable[[str], None]) -> Connection:
        return self.store.connect(self.node.rendezvous, self.node.member.link, opened, broke)

    def stop(self, why: str) -> None:
        """Answer no more."""
        if not self.over:
            self.over = True
            self._connection.close()
            if self._wakes is not None:
                self._wakes.close()
            self.ended(why)

    def _broke(self, why: str) -> None:
        self.broken = True
        self.stop(why)

    def close(self, linger: float) -> None:
        """Stop, once all have read how the job ended, or after so many seconds."""
        self.notify(events.CloseServer(linger))

    def _saw(self, state: JobState) -> None:
        if self.term is None:
            self.node.cluster.decided(self.nonce, state)
        elif self._way and _decide_alike(self._way[-1], state):
            self._way[-1] = state  # of ten thousand messages that come at once, few decide anything
        else:
            self._way.append(state)

    def _begin(self) -> None:
        self.server, actions = self.server.begin(self.node.rendezvous.clock())
        self._observe(None, None, actions)
        self._do(deque(actions))

    def _step(self, event: events.Event) -> deque[events.Action]:
        before, (self.server, actions) = self.server, self.server.step(event, self.node.rendezvous.clock())
        self._observe(event, before, actions)
        return deque(actions)

    def _observe(self, event: events.Event | None, before: Server | None, actions: tuple[events.Action, ...]) -> None:
        if (observer := self.node.cluster.observer) is not None:
            observer.stepped(self.node.name, event, before, self.server, actions, self.node.rendezvous.clock())

    def notify(self, event: events.Event) -> None:
        """Somebody else in its process says something."""
        if not self.over:
            for action in self._step(event):
                assert isinstance(action, events.Interrupt)
                self._interrupt()

    def node_ended(self, name: str) -> None:
        """The kernel of a node's machine resets the connection to it, and refuses another one."""
        for presence in self._watched:
            if presence.node == name:
                self.notify(events.NodeEnded(presence))

    def _call(self, kind: str, *arguments: Any, then: Callable[[Any], None]) -> None:
        def done(result: Any) -> None:
            if result is LOST:
                self.stop("another node coordinates now")
            elif not self.over:
                then(result)

        if not self.over:
            self._connection.call(kind, *arguments, then=done)

    def _do(self, actions: deque[events.Action]) -> None:
        """Do the first, then the next."""
        if self.over or not actions:
            return

        def go_on(_: Any = None) -> None:
            self._do(actions)

        match action := actions.popleft():
            case events.Load():
                self._call("load", then=self._loaded)
            case events.Save(data):
                self._save(data, actions)
            case Receive(timeout):
                self._receive(timeout)
            case Read(keys):
                self._call("read", keys, then=lambda found: self._do(self._step(events.HeartbeatsFetched(found))))
            case Write(values):
                self._call("write", values, then=go_on)
            case Discard(entries):
                self._call("discard", [entry.number for entry in entries], then=go_on)
            case Delete(keys):
                self._call("delete", keys, then=go_on)
            case events.Purge():
                self._call("purge", then=go_on)
            case events.ServerStopped():
                self.stop("closed")
            case events.WatchNodes(presences):
                self._watched = presences
                go_on()
            case events.Interrupt() | ClearForeign() | Log():
                go_on()
            case _:
                assert_never(action)

    def _loaded(self, saved: Any) -> None:
        if saved is DESTROYED:
            self._do(
                self._step(events.Destroyed("the coordinator's state was deleted from the store by another writer"))
            )
        else:
            self._do(self._step(events.Loaded(saved.data if saved else None)))

    def _save(self, data: bytes, rest: deque[events.Action]) -> None:
        saved = Saved(self.server.nonce, data, tuple(self._way))
        self._way = []

        def done(answer: Any) -> None:
            if answer is REFUSED and self.server.refused < REFUSALS:
                self._do(self._step(events.Unsaved("the store cannot store more", tuple(rest))))
            elif answer is REFUSED:
                self.stop("the store takes not even the end of the job")
            elif answer is CHANGED:
                self._do(
                    self._step(
                        events.OperationFailed("the coordinator's state in the store was changed by another writer")
                    )
                )
            elif answer:
                self._do(rest)
            else:
                self.stop("another node coordinates")

        self._call("save", self.term, saved, then=done)

    # The wait for entries.

    def _receive(self, timeout: float | None) -> None:
        self._waits += 1
        number = self._rests = self._waits
        if self._arrived:
            self._rise()
            return
        if not self._requested:
            self._requested = True
            self._call("receive", then=self._received)
        if timeout is not None:
            self.node.rendezvous.after(timeout, lambda: self._rise() if self._rests == number else None)

    def _received(self, entries: Any) -> None:
        self._requested = False
        if entries is DESTROYED:
            self._break()
            return
        self._arrived += entries
        if self._rests is not None:
            self._rise()

    def _break(self) -> None:
        """Report the end after a loss of incoming messages, and stop once the end is reported."""
        why = "the store's inbox counter was overwritten"
        if self._breaks:
            self.stop(why)
        elif self._rests is not None:
            self._breaks, self._rests = True, None
            self._do(self._step(events.OperationFailed(why)))

    def _rise(self) -> None:
        if not self.over:
            self._rests = None
            entries, self._arrived = self._arrived, []
            self._do(self._step(events.Arrived(entries)))

    def _interrupt(self) -> None:
        def post(connection: Connection) -> None:
            connection.call("post", b"", then=lambda _: None)

        if self._wakes is None:
            self._wakes = self._connect(post, lambda why: None)
        else:
            post(self._wakes)


def _decide_alike(one: JobState, other: JobState) -> bool:
    """Return whether two states agree in all decisions that nodes receive."""
    first, second = one.round, other.round
    same = first is second
    if first is not None and second is not None:
        same = first.entries is second.entries and first.assignments is second.assignments and first.end is second.end
    return same and one.final is other.final and one.restarts == other.restarts
