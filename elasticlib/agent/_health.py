"""
A small HTTP server by which a cluster's own tools can tell whether the agent of a node is alive.

Rules of this file: one thread answers, with nothing but numbers, whatever is asked; it never keeps a program from
ending. Clients take few descriptors and little time from the agent, however many come: there is room for some, each
has its time, and the one that has taken longest makes room for the next. As much of HTTP is spoken as a probe needs:
whatever a client says gets one short answer, or none yet.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Container, Mapping
from json import dumps
from typing import Any, TypeAlias

from elasticlib._clock import monotonic, wall_time
from elasticlib.errors import ConfigError
from elasticlib.processes import closed_in_forks, start_thread, wait_readable

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

_ROOM = 16
"""Clients that are listened to at once."""
_TIMEOUT = 5.0
"""Seconds that `stop` waits for a callback that does not return."""
_PAUSE = 0.5
"""Seconds until the next connection is accepted, where the last one could not be."""
_REQUEST_LIMIT = 5.0
"""Seconds that a client may take for its whole question."""
_LONGEST = 16384
"""Bytes of a question that are read."""
_END = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([A-Z]+) \S+ HTTP/1\.[0-9]\r?\n")
_SAID = {200: "OK", 400: "Bad Request", 501: "Not Implemented", 503: "Service Unavailable"}

_Answer: TypeAlias = Callable[[], tuple[int, dict[str, object]]]
"""Status and facts about the agent."""


class HealthCheckServer:
    """
    Answers every GET with status 200 while the agent lives, and with 503 otherwise.

    The agent lives while *alive_callback*, which returns whole seconds since the epoch, names a time that is at most
    *timeout* seconds ago. The body says so in JSON: ``alive``, ``last_progress`` and ``timeout``. It listens on *port*
    of every address of this machine, for those who ask are mostly elsewhere; 0 means any free port, which `port` names
    after `start`. Raises `ConfigError` for a port that is none. (torch:
    ``torch.distributed.elastic.agent.server.health_check_server.HealthCheckServer``, which listens nowhere)
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"port={port!r} must be a whole number from 0 (any free port) to 65535")
        self._alive_callback = alive_callback
        self._timeout = timeout
        self.port = port
        """Where it listens."""
        self._wake: int | None = None
        """Ends the thread that listens, while there is one."""
        self._thread: threading.Thread | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        """What is asked for the agent's last progress."""
        return self._alive_callback

    def start(self) -> None:
        """Begin to listen. Raises ``OSError`` when the port is in use or may not be used."""
        if self._wake is not None:
            return
        # One socket for both versions of IP, where the machine has both.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = closed_in_forks(socket.create_server(("", self.port), family=family, dualstack_ipv6=both))
        self.port = int(listener.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._serve, args=(listener, self._wake), name="elasticlib-health-check", daemon=True
        )
        try:
            start_thread(self._thread)
        except BaseException:
            listener.close()
            os.close(self._wake)
            self._wake = None
            raise

    def stop(self) -> None:
        """Cease to listen; may come at any time, more than once."""
        wake, self._wake = self._wake, None
        if wake is not None and self._thread is not None:
            os.eventfd_write(wake, 1)
            self._thread.join(_TIMEOUT)
            # A thread that still runs may use the descriptor.
            if not self._thread.is_alive():
                os.close(wake)

    def _serve(self, listener: socket.socket, wake: int) -> None:
        # By descriptor, the oldest first.
        clients: dict[int, _Client] = {}
        with listener:
            while True:
                ready = wait_readable([listener, wake, *clients], _time_left(clients))
                if wake in ready:
                    break
                self._serve_ready(clients, ready)
                _drop_late(clients)
                if listener.fileno() in ready and not self._admit(listener, clients):
                    wait_readable([wake], _PAUSE)
            for client in clients.values():
                client.close()

    def _serve_ready(self, clients: dict[int, _Client], ready: Container[int]) -> None:
        for number in [number for number in clients if number in ready]:
            if clients[number].is_served(self._answer):
                clients.pop(number).close()

    def _admit(self, listener: socket.socket, clients: dict[int, _Client]) -> bool:
        """Let one more client in; False when that cannot be, for now."""
        try:
            connection, _ = listener.accept()
        except OSError:
            # Who asked has gone away again, or still waits while no descriptor is free.
            if not clients:
                return False
            clients.pop(next(iter(clients))).close()
            return True
        client = _Client(connection)
        # Most clients have sent their whole request by now.
        if client.is_served(self._answer):
            client.close()
            return True
        # The client that has taken longest makes room.
        while len(clients) >= _ROOM:
            clients.pop(next(iter(clients))).close()
        clients[connection.fileno()] = client
        return True

    def _answer(self) -> tuple[int, dict[str, object]]:
        try:
            last = int(self._alive_callback())
        except Exception as error:
            return 503, {"alive": False, "error": f"{type(error).__name__}: {error}", "timeout": self._timeout}
        alive = wall_time() - last <= self._timeout
        return (200 if alive else 503), {"alive": alive, "last_progress": last, "timeout": self._timeout}


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """A `HealthCheckServer` that is not started yet. (torch: the function of this name)"""
    return HealthCheckServer(alive_callback, port, timeout)


def _time_left(clients: Mapping[int, _Client]) -> float | None:
    """Return the seconds until the time of the oldest client is over; None without clients."""
    if not clients:
        return None
    oldest = next(iter(clients.values()))
    return max(0.0, oldest.until - monotonic())


def _drop_late(clients: dict[int, _Client]) -> None:
    for number in [number for number, client in clients.items() if monotonic() >= client.until]:
        clients.pop(number).close()


class _Client:
    """One connection, and the part of its request that has arrived."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = closed_in_forks(connection)
        self._said = b""
        self.until = monotonic() + _REQUEST_LIMIT
        """When its time is over."""

    def is_served(self, answer: _Answer) -> bool:
        """Whether nothing more is to be done for it, now that it has said something."""
        try:
            piece = self._connection.recv(_LONGEST)
            self._said += piece
            said = _page(self._said, answer)
            if said is not None:
                # The answer is so short that it always finds room in the buffer.
                self._connection.send(said)
                self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return said is not None or not piece

    def close(self) -> None:
        """Forget it."""
        with contextlib.suppress(OSError):
            self._connection.close()


def _page(said: bytes, answer: _Answer) -> bytes | None:
    """What to send to a client that *said* this so far; None while that is no whole question."""
    if _END.search(said) is None:
        return None if len(said) < _LONGEST else _reply(400, {"error": f"a question has at most {_LONGEST} bytes"})
    request = _REQUEST.match(said)
    if request is None:
        return _reply(400, {"error": "this is no question in HTTP/1"})
    if request[1] not in (b"GET", b"HEAD"):
        return _reply(501, {"error": "ask with GET or HEAD"})
    return _reply(*answer(), body=request[1] == b"GET")


def _reply(status: int, facts: Mapping[str, Any], *, body: bool = True) -> bytes:
    content = dumps(facts).encode()
    head = (
        f"HTTP/1.0 {status} {_SAID[status]}\r\nServer: elasticlib\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
