"""
Waits for the end of a process on another machine, by a connection to it.

Rules of this file: the connection carries nothing. Its end is that of the process, and keep-alive
packets find the loss of the machine.
"""

from __future__ import annotations

import socket

from elasticlib.processes import wait_readable

_ATTEMPT = 5.0
_PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first packet and between two, and unanswered packets that end the connection."""


def wait_for_end(host: str, port: int, limit: float | None = None) -> None:
    """Return once the process that listens at *host* and *port* has ended, after *limit* s at the latest."""
    try:
        connection = socket.create_connection((host, port), _ATTEMPT)
    except OSError:
        # It has ended, or cannot be reached.
        return

    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # The process sends nothing before it is asked: the connection is readable at its end only.
        wait_readable([connection], limit)
