"""
Watches the presence sockets of nodes, in a thread of the coordinator's process.

    CONNECTING --connected--> CONNECTED --reset--> CONFIRMING --refused--> OVER: the node has ended
        |                         ^                    |--any other error--> OVER
        '--not--> OVER            '-----connected------'

Rules of this file: only a refusal after an earlier connection to the same socket proves the end of a node. Every other
event (a machine out of reach, a firewall, a full queue) proves nothing: then heartbeats decide. Nothing waits for an
answer, so that one silent machine delays no other.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import resource
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

from attrs import define

from elasticlib._clock import monotonic
from elasticlib._times import soonest
from elasticlib.errors import StartError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.coordinator._state import Presence
from elasticlib.rendezvous.net._presence import keep_alive

_ATTEMPT = 2.0
"""Seconds for one attempt to connect."""
_SHARE = 4
"""One of so many descriptors of this process may be a connection of a watch: the store needs the others."""


class PresenceWatch:
    """Reports each watched node once no process of it is left; `close` it at the end."""

    def __init__(self, report: Callable[[Presence], None]) -> None:
        """*report* is called in the thread of the watch."""
        self._report = report
        self._lock = threading.Lock()
        self._wanted: Sequence[Presence] = ()
        self._is_closed = False
        self._wake = -1
        self._thread: threading.Thread | None = None

    def watch(self, presences: Sequence[Presence]) -> None:
        """Watch these nodes from now on, and no others."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        with self._lock:
            self._wanted = presences[:most]
            if self._thread is None and presences:
                self._start()
            self._notify()

    def close(self) -> None:
        """End the thread, and close all connections."""
        with self._lock:
            self._is_closed = True
            self._notify()

    def _start(self) -> None:
        # Without a descriptor or a thread, heartbeats alone show the end of a node.
        with contextlib.suppress(OSError):
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="elasticlib-presence", daemon=True)
            try:
                start_thread(self._thread)
            except StartError:
                self._close_wake()

    def _notify(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        watches: dict[Presence, _NodeWatch] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, self)
            while (wanted := self._wanted_now()) is not None:
                _follow(watches, wanted, selector)
                self._turn(watches, selector)
            for watch in watches.values():
                watch.drop()
        with self._lock:
            self._close_wake()

    def _close_wake(self) -> None:
        os.close(self._wake)
        self._wake = -1

    def _wanted_now(self) -> Sequence[Presence] | None:
        """Return the nodes to watch; None at the end."""
        with self._lock:
            return None if self._is_closed else self._wanted

    def _turn(self, watches: dict[Presence, _NodeWatch], selector: selectors.BaseSelector) -> None:
        """Wait for the next event, and take each watch that it concerns a step further."""
        due = soonest(*(watch.deadline for watch in watches.values()))
        ready = self._await_any(selector, due)
        now = monotonic()
        concerned = [watch for watch in watches.values() if watch in ready or watch.is_late(now)]
        ended = [watch.presence for watch in concerned if watch.proves_end()]
        for presence in ended:
            self._report(presence)

    def _await_any(self, selector: selectors.BaseSelector, due: float | None) -> set[object]:
        """Return the watches whose connections have an event, after the time *due* at the latest."""
        timeout = None if due is None else max(0.0, due - monotonic())
        ready = {key.data for key, _ in selector.select(timeout)}
        if self in ready:
            os.eventfd_read(self._wake)
        return ready


def _follow(watches: dict[Presence, _NodeWatch], wanted: Sequence[Presence], selector: selectors.BaseSelector) -> None:
    """Begin to watch the *wanted* nodes that are new, and drop the others."""
    for presence in watches.keys() - set(wanted):
        watches.pop(presence).drop()
    for presence in wanted:
        if presence not in watches:
            watches[presence] = _NodeWatch(presence, selector)
            watches[presence].connect()


class _State(enum.Enum):
    CONNECTING = enum.auto()
    CONNECTED = enum.auto()
    CONFIRMING = enum.auto()
    OVER = enum.auto()
    """The node has ended, or only its heartbeats show its end."""


@define(eq=False)
class _NodeWatch:
    """One node, and the connection to its socket."""

    presence: Presence
    _selector: selectors.BaseSelector
    state: _State = _State.CONNECTING
    deadline: float | None = None
    """Time at which the attempt to connect has failed; None without one."""
    _refusal: int = 0
    """Error of an attempt that has failed at once, else 0."""
    _connection: socket.socket | None = None

    def connect(self) -> None:
        """Begin an attempt to connect."""
        self.deadline = monotonic() + _ATTEMPT
        try:
            self._refusal = self._begin()
        except OSError as error:
            self._refusal = error.errno or errno.EINVAL
        if self._refusal:
            # There is nothing to wait for.
            self.deadline = monotonic()

    def _begin(self) -> int:
        """Return the error of an attempt that has failed at once, else 0."""
        host = self.presence.address
        # Only addresses: a name server that does not answer would hold up all watches.
        found = socket.getaddrinfo(host, self.presence.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, place = found[0]
        connection = self._connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        keep_alive(connection)
        error = connection.connect_ex(place)
        self._selector.register(connection, selectors.EVENT_WRITE, self)
        return 0 if error == errno.EINPROGRESS else error

    def is_late(self, now: float) -> bool:
        """Return whether the attempt to connect has failed for want of an answer."""
        return self.deadline is not None and now >= self.deadline

    def proves_end(self) -> bool:
        """
        Take note of the connection's event, or of the end of the attempt's time.

        Return whether no process of the node is left.
        """
        error = self._error()
        self.deadline = None
        if self.state is _State.CONNECTED:
            self.drop()
            self.state = _State.CONFIRMING
            self.connect()
        elif error == 0:
            self._stay_connected()
        else:
            was_connected = self.state is _State.CONFIRMING
            self.drop()
            self.state = _State.OVER
            return was_connected and error == errno.ECONNREFUSED
        return False

    def _error(self) -> int:
        """Return the error of an attempt to connect; 0 once it has succeeded."""
        if self._refusal or self._connection is None:
            return self._refusal
        error = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return error
        try:
            self._connection.getpeername()
        except OSError:
            # Neither an error nor a peer: the attempt still waits for an answer.
            return errno.ETIMEDOUT
        return 0

    def _stay_connected(self) -> None:
        """Wait for the end of the connection, on which nothing is sent."""
        assert self._connection is not None
        self.state = _State.CONNECTED
        self._selector.modify(self._connection, selectors.EVENT_READ, self)

    def drop(self) -> None:
        """Close the connection."""
        connection, self._connection, self.deadline = self._connection, None, None
        if connection is not None:
            # An attempt that failed at once may have left the socket unregistered.
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()
