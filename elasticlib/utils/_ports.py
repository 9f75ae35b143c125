"""Ports of this machine that are free."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from elasticlib.errors import StartError

if TYPE_CHECKING:
    import socket


def get_socket_with_port() -> socket.socket:
    """
    A socket on a port that is free on all addresses of this machine; close it when somebody else needs the port.

    It does not listen, so nobody can connect to it by mistake. Raises `StartError` (a ``RuntimeError``) when there is
    no such port. (torch: ``torch.distributed.elastic.utils.get_socket_with_port``; before 2.15 it listened on
    loopback, where a port is free that another address may have taken.)
    """
    import socket  # only here: the help text of the command line need not wait for it

    troubles = []
    # IPv6 first, for IPv4 as well: what will listen there, such as torch's TCPStore, takes both.
    for family, place in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with contextlib.ExitStack() as unless_bound:
                holder = unless_bound.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                holder.bind((place, 0))
                unless_bound.pop_all()
                return holder
        except OSError as error:
            troubles.append(f"{place}: {error}")
    raise StartError(f"no port is free on all addresses: {'; '.join(troubles)}")


def get_free_port() -> int:
    """
    The number of a port that was free on all addresses a moment ago; nobody keeps it for the caller.

    Whoever can, takes the socket of `get_socket_with_port` instead. Raises as that does. (torch:
    ``torch.distributed.elastic.utils.distributed.get_free_port``)
    """
    with get_socket_with_port() as holder:
        return int(holder.getsockname()[1])
