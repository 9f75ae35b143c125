"""
Shows the end of processes on another machine, by a connection to them.

A node's launcher listens on a *presence socket*, and its workers hold the same socket. Nobody
accepts a connection there: the kernel completes it, and resets it when the last process that holds
the socket has ended. A refused connection after that proves that none of them is left.

Rules of this file: a connection carries nothing, and keep-alive packets find the loss of the
machine.
"""

from __future__ import annotations

import socket

from elasticlib.processes import wait_readable
from elasticlib.rendezvous.net._endpoint import is_loopback
from elasticlib.rendezvous.net._node_info import listening_socket

_ATTEMPT = 1.0
"""Seconds: a machine in contact answers at once."""
_PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first packet and between two, and unanswered packets that end the connection."""


def presence_socket(own_address: str | None, endpoint: str) -> socket.socket | None:
    """
    Return a presence socket for a node at *own_address*, or with the job's store at *endpoint*.

    None if this machine refuses it: then heartbeats alone show the end of the node.
    """
    host = endpoint.rpartition(":")[0].strip("[]")
    address = own_address or (host if is_loopback(host) else "")
    try:
        found, _ = listening_socket(address, 0)
    except OSError:
        return None
    return found


def connected(host: str, port: int) -> socket.socket | None:
    """Return a connection to the process that listens at *host* and *port*; None if it cannot be reached."""
    try:
        connection = socket.create_connection((host, port), _ATTEMPT)
    except OSError:
        return None

    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel end *connection* some seconds after the other machine has stopped to answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for_end(connection: socket.socket, limit: float | None = None) -> None:
    """Return once the process at the other end of *connection* has ended, after *limit* s at the latest."""
    # It sends nothing before it is asked: the connection is readable at its end only.
    wait_readable([connection], limit)
