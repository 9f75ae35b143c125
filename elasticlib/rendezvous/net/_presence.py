"""
Waits for the end of a process on another machine, by a connection to it.

Rules of this file: the connection carries nothing. Its end is that of the process, and keep-alive
packets find the loss of the machine.
"""

from __future__ import annotations

import socket

from elasticlib.processes import wait_readable

_ATTEMPT = 1.0
"""Seconds: a machine in contact answers at once."""
_PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first packet and between two, and unanswered packets that end the connection."""


def connected(host: str, port: int) -> socket.socket | None:
    """Return a connection to the process that listens at *host* and *port*; None if it cannot be reached."""
    try:
        connection = socket.create_connection((host, port), _ATTEMPT)
    except OSError:
        return None

    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def wait_for_end(connection: socket.socket, limit: float | None = None) -> None:
    """Return once the process at the other end of *connection* has ended, after *limit* s at the latest."""
    # It sends nothing before it is asked: the connection is readable at its end only.
    wait_readable([connection], limit)
