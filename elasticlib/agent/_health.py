"""
A small HTTP server that answers a cluster's health checks of an agent.

Rules of this file: one thread answers every request, only with numbers. It never keeps a program
from exiting. Clients cannot use up the agent's descriptors or time: their number and the time of
each are limited. The oldest one is dropped for the next. It implements only the part of HTTP that a
probe needs: each request gets one short answer.
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
"""Maximum number of clients at the same time."""
_TIMEOUT = 5.0
"""Seconds that `stop` waits for a callback that does not return."""
_PAUSE = 0.5
"""Seconds until the next connection is accepted after one could not be."""
_REQUEST_LIMIT = 5.0
"""Seconds that a client may take to send its request."""
_LONGEST = 16384
"""Maximum number of bytes of a request."""
_END = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([A-Z]+) \S+ HTTP/1\.[0-9]\r?\n")
_REASONS = {200: "OK", 400: "Bad Request", 501: "Not Implemented", 503: "Service Unavailable"}

_Answer: TypeAlias = Callable[[], tuple[int, dict[str, object]]]
"""Function that returns the HTTP status and facts about the agent."""


class HealthCheckServer:
    """
    HTTP server that answers each GET with status 200 while the agent is alive, and else with 503.

    The agent is alive if the time that *alive_callback* returns (in whole seconds since the epoch)
    is at most *timeout* seconds ago. The body is JSON: ``alive``, ``last_progress`` and
    ``timeout``. The server listens on *port* of every address of this machine, because most
    clients are on other machines. 0 means any free port; `port` has its number after `start`.
    Raises `ConfigError` for an invalid port. (torch:
    ``torch.distributed.elastic.agent.server.health_check_server.HealthCheckServer``, which does not
    listen)
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"port={port!r} must be a whole number from 0 (any free port) to 65535")
        self._alive_callback = alive_callback
        self._timeout = timeout
        self.port = port
        """Port to listen on."""
        self._wake: int | None = None
        """Event descriptor that ends the thread; None while no thread runs."""
        self._thread: threading.Thread | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        """Function that returns the time of the agent's last progress."""
        return self._alive_callback

    def start(self) -> None:
        """Start to listen. Raises ``OSError`` if the port is in use or not permitted."""
        if self._wake is not None:
            return

        # One socket for both versions of IP, if the machine has both.
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
        """Stop listening; it may be called at any time, and more than once."""
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
        """Accept one more client; return False if that is currently impossible."""
        try:
            connection, _ = listener.accept()
        except OSError:
            # The client has closed the connection, or waits while no descriptor is free.
            if not clients:
                return False
            clients.pop(next(iter(clients))).close()
            return True

        client = _Client(connection)

        # Most clients have sent their whole request by now.
        if client.is_served(self._answer):
            client.close()
            return True

        # Drop the oldest client.
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
    """Return a `HealthCheckServer` that is not started yet. (torch: the function of this name)"""
    return HealthCheckServer(alive_callback, port, timeout)


def _time_left(clients: Mapping[int, _Client]) -> float | None:
    """Return the seconds until the oldest client's time is over; None without clients."""
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
        self._request = b""
        self.until = monotonic() + _REQUEST_LIMIT
        """Deadline of the client, on the monotonic clock."""

    def is_served(self, answer: _Answer) -> bool:
        """Read from the client and answer a complete request; return whether it is done."""
        try:
            piece = self._connection.recv(_LONGEST)
            self._request += piece
            reply = _page(self._request, answer)
            if reply is not None:
                # The answer is so short that it always fits into the buffer.
                self._connection.send(reply)
                self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return False
        except OSError:
            return True

        return reply is not None or not piece

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def _page(data: bytes, answer: _Answer) -> bytes | None:
    """Return the reply to the request *data*; None if the request is still incomplete."""
    if _END.search(data) is None:
        return None if len(data) < _LONGEST else _reply(400, {"error": f"a request has at most {_LONGEST} bytes"})
    request = _REQUEST.match(data)
    if request is None:
        return _reply(400, {"error": "this is not an HTTP/1 request"})
    if request[1] not in (b"GET", b"HEAD"):
        return _reply(501, {"error": "use GET or HEAD"})
    return _reply(*answer(), body=request[1] == b"GET")


def _reply(status: int, facts: Mapping[str, Any], *, body: bool = True) -> bytes:
    content = dumps(facts).encode()
    head = (
        f"HTTP/1.0 {status} {_REASONS[status]}\r\nServer: elasticlib\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
