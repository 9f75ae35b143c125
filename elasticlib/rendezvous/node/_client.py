"""
One node's side of the rendezvous: the threads and descriptors around a `Session`, which decides
everything.

Rules of this file: the owner's calls only step the session, so that no silent store can block the
owner. A thread that steps it holds `turned`, and does at once what the session asks. No call under
that lock can block. The threads of a connection perform the session's requests and report their
outcome; they decide nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from attrs import define, field
from typing_extensions import Self, assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib._times import soonest
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    StartError,
)
from elasticlib.processes import open_files_needed, start_thread
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.node._identity import NodeIdentity
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_liveness import Limits, TimePassed
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._exchange import Exchange, RequestRefusedError
from elasticlib.rendezvous.protocol._operations import Log, perform
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._shortening import ENVELOPE, fitting

_log = logging.getLogger("elasticlib")

_LONGEST_JOIN = ENVELOPE // 8
"""Bytes of a request to join with this node's description; a longer one is refused here."""
_PARTING = 1.0
"""Seconds that `close` waits for a store which does not answer."""

Dial: TypeAlias = Callable[[float], Exchange]
"""One attempt to connect, with a time limit in seconds; raises `RendezvousConnectionError`."""


class NodeInfo(Protocol):
    """The descriptor of this node for a round, and its socket."""

    def describe(self, slots: int, role: str) -> messages.Descriptor:
        """Bind the socket for a round and return the descriptor; called in a separate thread, once contact is there."""

    def listener(self) -> socket.socket | None:
        """Return the socket that was bound for the last descriptor, now the caller's own; None if there is none."""


class NodeClient:
    """
    The node called *node*, as a partner of the coordinator of job *run_id*; fulfils `Membership`.

    Nothing is contacted before `start`: *dial* is called in a thread, and may use the object that
    made the member. Each report raises `RendezvousClosedError` after `close`.
    """

    def __init__(
        self,
        dial: Dial,
        node: str,
        offer: NodeInfo,
        *,
        run_id: str = "",
        terms: messages.Terms | None = None,
        key: bytes | None = None,
        limits: Limits | None = None,
        clock: Clock = monotonic,
        on_leave: Callable[[messages.Leave], bool] = lambda leave: False,
        where: str = "",
        after: str = "",
        sent: int = 0,
    ) -> None:
        self.node = node
        self.round: int | None = None
        """The round of the last rank assignment."""
        self.final: messages.Final | None = None
        """The end of this node's part in the job, once `drain` has returned it."""
        self._offer = offer
        self._clock = clock
        self._on_leave = on_leave
        self.turned = threading.Condition(threading.RLock())
        """Held while a connection is called; notified when there is something to do."""
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connections = ClientConnections(self, dial)
        identity = NodeIdentity(run_id, node, key, after=after, sent=sent)
        self._session, self._first = Session.begin(identity, limits or Limits(), clock(), terms, where)

    def start(self) -> Self:
        """Start to look for the job; once. Return the member itself."""
        with self.turned:
            self._perform(self._first)
        return self

    # Reports.

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round. No worker of this node may run any more."""
        self._say(events.Seek(slots, role), "a Join")

    def post(self, report: messages.WorkerReport | messages.Close) -> None:
        """
        Report the state of the workers, or end the job for all nodes; long reports are shortened.

        `Final` or `RoundEnd` answers a `Succeeded`, `Final` a `Close` and a `Leave`. A `Leave` is
        sent as soon as it is known that this node leaves and starts no worker any more. Until the
        `Stopped` of the round that it names, no node takes the place of its workers. A node that
        never joined is unknown and gets no answer.
        """
        # If the job must end with this node, its coordinator is here and needs no message.
        if not isinstance(report, messages.Leave) or not self._on_leave(report):
            self._say(events.SendReport(_checked(fitting(report))), type(report).__name__)

    def hold(self, paused: bool) -> None:
        """Pause this node's heartbeats, so that the others count it as lost, or resume them."""
        self.deliver(events.SuspendHeartbeats(paused))

    def fail(self, error: RendezvousError) -> None:
        """Make `drain` raise *error*, as this node's part is over. May be called from any thread."""
        self.deliver(events.Refused(None, error))

    def guard(self, handle: int) -> None:
        """Do nothing: in the agent's own process, no other thread could act when the agent cannot."""

    # Events.

    def listener(self) -> socket.socket | None:
        """Return the bound socket for the worker store of a round in which this node has group rank 0."""
        return self._offer.listener()

    def waiting(self) -> int:
        """Return the number of nodes that waited for ranks during a round, as of the last heartbeat."""
        return self._session.spares

    def seen(self) -> Seen:
        """Return the latest known state of the job."""
        return self._session.seen

    def is_over(self) -> bool:
        """Return whether `Final` came."""
        return self.final is not None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has something; `close` closes it."""
        return self._ready

    def poll_timeout(self) -> float | None:
        """Return the seconds until `drain` must be called even if nothing is readable."""
        return self._until(self._session.wake_at())

    def kill_in(self) -> float | None:
        """Return the seconds until workers that still run here must be killed; None: no limit yet."""
        when = self._session.kill_at()
        return None if when is None else when - self._clock()

    def drain(self) -> list[MembershipEvent]:
        """
        Return the new events, oldest first, without blocking.

        Raises:

        * `RendezvousNotFoundError` when the job was not found in time
        * `RendezvousConnectionError` when contact was lost for good
        * `RendezvousStateError` or `RendezvousClosedError` when this node does not belong to the
          job
        * `ConfigError` when the store cannot be used in the requested way
        """
        with self.turned:
            if self._session.closed:
                return []
            # Read before the session is asked: a later event makes the descriptor readable again.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready)
            self.deliver(TimePassed())
            self._session, notices = self._session.drain()

            # After the job's end a connection may break: the agent does not need to know.
            error = None if self._session.final is not None else self._session.error
            if error is not None and notices:
                # The next call raises it.
                os.eventfd_write(self._ready, 1)

        if error is not None and not notices:
            raise error

        self._note(notices)
        return list(notices)

    def _note(self, notices: Iterable[MembershipEvent]) -> None:
        for notice in notices:
            if isinstance(notice, messages.RankAssignment):
                self.round = notice.round
            elif isinstance(notice, messages.Final):
                self.final = notice

    def close(self) -> None:
        """Send pending messages, end the watch, close `fileno`. Sends nothing new to the others."""
        with self.turned:
            if self._session.closed:
                return
            self.deliver(events.CloseSession())

        # Without the lock: the threads take it to report the outcome of their last request.
        self._connections.join(_PARTING)
        # Bound for a round that never came, or whose ranks went to other nodes.
        if (listener := self._offer.listener()) is not None:
            listener.close()
        with self.turned:
            self._connections.abandon()
            os.close(self._ready)
            # No event may write to this number any more: another file may get it soon.
            self._ready = -1
            self.turned.notify_all()

    # Calls of the connections.

    def deliver(self, event: events.Event, thread: events.ConnectionThread | None = None) -> None:
        """Pass *event* to the session, and do its actions; the *thread* of its connection finds its own work."""
        with self.turned:
            # The actions are done under the lock, so that a second event cannot overtake them.
            before, due = self._session, self._due_at()
            self._session, actions = before.step(event, self._clock())
            self._perform(actions)
            has_news = self._has_news(before)

            # The agent sleeps until the time that it knows: an earlier one must wake it.
            is_sooner = self._due_at() < due
            if self._ready >= 0 and (has_news or is_sooner):
                os.eventfd_write(self._ready, 1)
            connection = getattr(event, "connection", None)
            has_work = any(not _is_own_work(action, connection, thread) for action in actions)
            if has_work or before.speaks_at() != self._session.speaks_at():
                # A connection has something to do, or something else to wait for.
                self.turned.notify_all()

    def _has_news(self, before: Session) -> bool:
        """Return whether the agent has something new to `drain` since *before*."""
        has_notices = len(before.unread) != len(self._session.unread)
        return has_notices or before.error != self._session.error

    def _due_at(self) -> float:
        times = soonest(self._session.wake_at(), self._session.kill_at())
        return math.inf if times is None else times

    def describe(self, slots: int, role: str) -> messages.Descriptor:
        """Return this node's descriptor; raises `RendezvousStateError` if it is not a valid message."""
        return _valid_descriptor(self._offer.describe(slots, role), self.node)

    def idle(self) -> float | None:
        """Return the seconds until the speaking thread must look for work on its own. Call with `turned` held."""
        return self._until(self._session.speaks_at())

    def _until(self, when: float | None) -> float | None:
        return None if when is None else max(0.0, when - self._clock())

    def _say(self, event: events.Event, what: str) -> None:
        with self.turned:
            if self._session.closed:
                raise RendezvousClosedError(f"node {self.node} has closed its rendezvous and cannot send {what:.60}")
            self.deliver(event)

    def _perform(self, actions: tuple[events.Action, ...]) -> None:
        for action in actions:
            try:
                self._do(action)
            # No thread could be started: no further attempt helps, and `drain` reports that to the
            # agent.
            except StartError as error:
                self.deliver(events.Refused(None, error))

    def _do(self, action: events.Action) -> None:
        match action:
            case events.OpenConnection(number, limit):
                self._connections.open(number, limit)
            case events.Ask():
                self._connections.ask(action)
            case events.Disconnect():
                self._connections.end()
            case Log(level, text):
                _log.log(logging.getLevelName(level.upper()), text)
            case _:
                assert_never(action)


def _is_own_work(action: events.Action, connection: int | None, thread: events.ConnectionThread | None) -> bool:
    """Return whether the *thread* that is at work finds the action on its own."""
    if not isinstance(action, events.Ask):
        return False
    return action.connection == connection and action.thread == thread


def _checked(report: messages.Report) -> messages.Report:
    # An invalid report of this node is its own error, raised at once and only here.
    messages.from_plain(messages.to_plain(report))
    return report


def _valid_descriptor(descriptor: messages.Descriptor, node: str) -> messages.Descriptor:
    join = messages.Join(node, descriptor, None)
    _checked(join)
    # An error of this node: the coordinator refuses messages that are too long, and would never answer.
    if (size := len(messages.encode(join))) > _LONGEST_JOIN:
        why = f"the description of node {node} has {size:,} bytes, but the limit is {_LONGEST_JOIN:,}"
        raise RendezvousStateError(f"{why}: shorten the role or the name of the script")
    return descriptor


@define(eq=False)
class ClientConnections:
    """
    The connections of a client to the job's store, one after the other; only the latest one is
    used. Call all methods but `join` with `turned` held.
    """

    client: NodeClient
    dial: Dial
    _latest: Connection | None = None

    def open(self, number: int, limit: float) -> None:
        """
        Give the latest connection up, and start the next one, with *limit* seconds for its attempt
        to connect. Raises `StartError` when no thread can be started.
        """
        self.abandon()
        # Each has a number in the session: later reports of an abandoned one are ignored.
        self._latest = Connection(number, self.client, self.dial, limit)
        self._latest.start()

    def ask(self, ask: events.Ask) -> None:
        """Perform *ask*, unless the connection was given up."""
        assert self._latest is not None
        self._latest.ask(ask)

    def end(self) -> None:
        """End the connection after the pending requests."""
        if self._latest is not None:
            self._latest.end()

    def abandon(self) -> None:
        """Give the connection up without blocking."""
        if self._latest is not None:
            self._latest.abandon()

    def join(self, timeout: float) -> None:
        """Wait until the connection's threads have ended, at most *timeout* seconds for each."""
        if self._latest is not None:
            self._latest.join(timeout)


@define(eq=False)
class Connection:
    """
    A connection to the job's store, from its first attempt to its end; `start` it once. It has two threads.

    One that was given up ends when its last call returns, which in a frozen store may take minutes.
    """

    number: int
    client: NodeClient
    """The owner of the connection: it holds `turned` when it calls, and the threads report to it without that lock."""
    dial: Dial
    limit: float
    """Seconds for the attempt to connect."""
    _work: dict[events.ConnectionThread, events.Ask] = field(factory=dict)
    _ending: bool = False
    _watch: Exchange | None = None
    _exchange: Exchange | None = None
    _threads: list[threading.Thread] = field(factory=list)

    def start(self) -> None:
        """Begin to connect. Raises `StartError` when no thread can be started."""
        self._run(self._speak, "elasticlib-member")

    def ask(self, ask: events.Ask) -> None:
        """Perform *ask*, unless this connection was given up. Call with `turned` held."""
        if not self._ending:
            self._work[ask.thread] = ask

    def end(self) -> None:
        """End the connection after the pending requests. Call with `turned` held."""
        self._ending = True

    def abandon(self) -> None:
        """Give the connection up without blocking. Call with `turned` held."""
        self._ending = True
        self._work.clear()
        if self._watch is not None:
            # The watching thread may wait in the store for minutes; the speaking one ends with its call.
            self._watch.close()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, at most *timeout* seconds for each."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with open_files_needed("the rendezvous"):
                work()
        except RendezvousConnectionError as error:
            self.client.deliver(events.ConnectionLost(self.number, str(error), isinstance(error, RefusedError)))
        except (RendezvousError, ConfigError, StartError) as error:
            self.client.deliver(events.Refused(self.number, error))
        except Exception as error:
            # An error of this library or of a backend: without this the node would wait without
            # end.
            _log.exception("a thread of the rendezvous failed")
            self.client.deliver(events.Refused(self.number, RendezvousStateError(f"the rendezvous failed: {error!r}")))

    def _speak(self) -> None:
        exchange = self._exchange = self.dial(self.limit)
        try:
            with self.client.turned:
                # Before the first request: when the first notice is awaited, its connection exists.
                if not self._ending:
                    self._run(self._listen, "elasticlib-notices")
            self.client.deliver(events.Connected(self.number))
            self._serve(events.ConnectionThread.SPEAK, exchange)
        finally:
            exchange.close()

    def _listen(self) -> None:
        assert self._exchange is not None
        exchange = self._watch = self._exchange.clone()
        try:
            self._serve(events.ConnectionThread.WATCH, exchange)
        finally:
            exchange.close()

    def _serve(self, thread: events.ConnectionThread, exchange: Exchange) -> None:
        while (ask := self._next(thread)) is not None:
            self.client.deliver(self._done(ask, exchange), thread)

    def _done(self, ask: events.Ask, exchange: Exchange) -> events.Event:
        what = ask.operation
        if isinstance(what, events.Describe):
            return events.OperationDone(self.number, ask.number, self.client.describe(what.slots, what.role))
        try:
            return events.OperationDone(self.number, ask.number, perform(exchange, what))
        except RequestRefusedError as error:
            # The store has answered, so the connection is good: only this request has failed.
            return events.Denied(self.number, ask.number, str(error), error.too_large)

    def _idle(self, thread: events.ConnectionThread) -> float | None:
        """Return the seconds until the thread has work of its own; only the speaking thread ever has."""
        return self.client.idle() if thread is events.ConnectionThread.SPEAK else None

    def _next(self, thread: events.ConnectionThread) -> events.Ask | None:
        """Return the next operation of the thread, once there is one; None at the end."""
        while True:
            with self.client.turned:
                # Pending requests are done even if the connection ends: a goodbye is requested just
                # before.
                if (ask := self._work.pop(thread, None)) is not None:
                    return ask
                if self._ending:
                    return None
                idle = self._idle(thread)
                # Without a time of its own it waits until the client has a request for it.
                is_early = idle is None or idle > 0
                if is_early:
                    self.client.turned.wait(idle)

            # Outside the wait, as the tick may give this thread its next operation.
            if not is_early:
                self.client.deliver(TimePassed())
