"""Ports of this machine that are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticlib.errors import StartError

if TYPE_CHECKING:
    import socket


def get_socket_with_port() -> socket.socket:
    """
    A socket that listens on loopback, on a port that the kernel chose; close it when somebody else needs the port.

    Raises `StartError` (a ``RuntimeError``) when no address of ``localhost`` can be listened on. (torch:
    ``torch.distributed.elastic.utils.get_socket_with_port``)
    """
    import socket  # only here: the help text of the command line need not wait for it

    troubles = []
    for family, kind, protocol, _, place in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(place)
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            troubles.append(f"{place[0]}: {error}")
    raise StartError(f"no port of localhost could be opened: {'; '.join(troubles) or 'it has no address'}")


def get_free_port() -> int:
    """
    The number of a port of ``localhost`` that was free a moment ago; nobody keeps it for the caller.

    Whoever can, takes the socket of `get_socket_with_port` instead. Raises as that does. (torch:
    ``torch.distributed.elastic.utils.distributed.get_free_port``)
    """
    with get_socket_with_port() as listener:
        return int(listener.getsockname()[1])
