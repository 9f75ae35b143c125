"""
A small HTTP server by which a cluster's own tools can tell whether the agent of a node is alive.

Rules of this file: it answers from a thread of its own, with nothing but numbers, whatever is asked; it never keeps
a program from ending.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elasticlib._programs import own, start_thread
from elasticlib._wire import wait_readable
from elasticlib.errors import ConfigError

if TYPE_CHECKING:
    from elasticlib.agent._health_page import Server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

_ALONE = 1.0
"""Seconds that a client may take for its question where there is no thread but the one that listens."""
_PAUSE = 0.5
"""Seconds until the next connection is accepted, where the last one could not be."""


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
        from elasticlib.agent._health_page import Server

        server = Server(self._answer)  # made here, where it may fail, not in the thread
        listener = _listen(self.port)
        self.port = int(listener.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._serve, args=(listener, server, self._wake), name="elasticlib-health-check", daemon=True
        )
        start_thread(self._thread)

    def stop(self) -> None:
        """Cease to listen; may come at any time, more than once."""
        wake, self._wake = self._wake, None
        if wake is not None and self._thread is not None:
            os.eventfd_write(wake, 1)
            self._thread.join()
            os.close(wake)

    def _serve(self, listener: socket.socket, server: Server, wake: int) -> None:
        with listener, server:
            while wake not in wait_readable([listener, wake], None):
                try:
                    client, address = listener.accept()
                except OSError:
                    # Who asked has gone away again, or still waits while no descriptor is free.
                    wait_readable([wake], _PAUSE)
                    continue
                try:
                    server.process_request(client, address)
                except RuntimeError:  # no thread can be started, which is no reason to seem dead
                    if _has_asked(client, wake):
                        server.process_request_thread(client, address)
                    else:
                        server.shutdown_request(client)

    def _answer(self) -> tuple[int, dict[str, object]]:
        try:
            last = int(self._alive_callback())
        except Exception as error:
            return 503, {"alive": False, "error": f"{type(error).__name__}: {error}", "timeout": self._timeout}
        alive = time.time() - last <= self._timeout
        return (200 if alive else 503), {"alive": alive, "last_progress": last, "timeout": self._timeout}


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """A `HealthCheckServer` that is not started yet. (torch: the function of this name)"""
    return HealthCheckServer(alive_callback, port, timeout)


def _has_asked(client: socket.socket, wake: int) -> bool:
    """Whether *client* says all that it has to say in the time that it gets, so that reading it waits for nothing."""
    with contextlib.suppress(OSError):
        if client.fileno() in wait_readable([client, wake], _ALONE):
            return b"\r\n\r\n" in client.recv(65536, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return own(socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True))
    return own(socket.create_server(("", port)))
