"""
torch stores for programs that set up their own, and free ports for them.

(torch: ``torch.distributed.elastic.utils.distributed``)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticlib.errors import ConfigError, RendezvousTimeoutError, StartError
from elasticlib.utils.store import barrier

if TYPE_CHECKING:
    import socket

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_TAKEN = ("EADDRINUSE", "address already in use")
"""Texts in torch's error for a port in use; the error has no number."""


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """
    Return a client of the ``TCPStore`` at *server_addr*:*server_port*; the server also opens the store.

    Port -1 means any free port, for a server without clients. The kernel chooses it, and chooses
    again if another program has it on one of the machine's addresses, *retries* times in all (at
    least once). With *wait_for_workers* the call returns when all *world_size* callers are
    connected. *timeout*, in seconds, also becomes the timeout of the store. *use_libuv* applies to
    the server; None: the environment variable ``USE_LIBUV`` (default 1).

    Raises

    * `ConfigError` (a ``ValueError``) for port -1 if clients must know the port;
    * `RendezvousTimeoutError` (a ``TimeoutError``) if not all callers have connected in time;
    * torch's ``DistNetworkError`` (a ``RuntimeError``) if the port is in use or no server answers.

    (torch: ``torch.distributed.elastic.utils.distributed.create_c10d_store``)
    """
    if server_port == -1 and (world_size > 1 or not is_server):
        who = f"world_size={world_size} callers" if world_size > 1 else "a client (is_server=False)"
        raise ConfigError(
            f"server_port=-1 means any free port, but {who} must know the port: give one, such as server_port=29500"
        )

    from torch.distributed import DistStoreError

    options = {
        "world_size": world_size,
        "is_master": is_server,
        "timeout": timedelta(seconds=timeout),
        "wait_for_workers": False,
        "use_libuv": os.environ.get("USE_LIBUV", "1") == "1" if use_libuv is None else use_libuv,
    }
    tries = max(retries, 1) if server_port == -1 else 1
    store = _open_store(server_addr, max(server_port, 0), tries, options)
    if not wait_for_workers:
        return store

    try:
        barrier(store, world_size, "elasticlib/members", timeout)
    except DistStoreError as error:
        raise RendezvousTimeoutError(
            f"not all of the {world_size} callers connected to the store at {store.host}:{store.port} "
            f"within {timeout:g} s"
        ) from error

    return store


def _open_store(address: str, port: int, tries: int, options: Mapping[str, Any]) -> TCPStore:
    """Open the store; try up to *tries* times if the kernel chooses the port (0)."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    for _ in range(tries - 1):
        try:
            return TCPStore(address, port, **options)
        except DistNetworkError as error:
            # The kernel's free port is free on one address; another program may use it on another.
            if not _is_taken(error):
                raise

    return TCPStore(address, port, **options)


def _is_taken(error: Exception) -> bool:
    return any(text in str(error) for text in _TAKEN)


def get_socket_with_port() -> socket.socket:
    """
    Return a socket bound to a port that is free on all addresses of this machine.

    Close it when another program needs the port. It does not listen, so no client can connect to it
    by mistake. Raises `StartError` (a ``RuntimeError``) if no port is free. (torch:
    ``torch.distributed.elastic.utils.get_socket_with_port``; before 2.15 it listened on loopback,
    where a port may be free that is in use on another address.)
    """
    # The import is slow, and the help text of the command line does not need it.
    import socket

    troubles = []

    # IPv6 first, for IPv4 as well: later listeners, such as torch's TCPStore, use both.
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

    raise StartError(f"no free port could be bound: {'; '.join(troubles)}")


def get_free_port() -> int:
    """
    Return a port that was free on all addresses a moment ago; another program may take it.

    Use the socket of `get_socket_with_port` instead if you can. Raises `StartError` like that
    function. (torch: ``torch.distributed.elastic.utils.distributed.get_free_port``)
    """
    with get_socket_with_port() as holder:
        return int(holder.getsockname()[1])


__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
