"""
Stores of torch for programs that set up their own, and the free ports to put them on.

(torch: ``torch.distributed.elastic.utils.distributed``)
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from elasticlib.errors import ConfigError, RendezvousTimeoutError
from elasticlib.utils._ports import get_free_port, get_socket_with_port
from elasticlib.utils.store import barrier

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_TAKEN = ("EADDRINUSE", "address already in use")
"""In the text of torch's error, which has no number, of a port that is in use."""


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
    A connection to the ``TCPStore`` at *server_addr*:*server_port*, which the server opens, too.

    Port -1 is any free one, for a server alone: the kernel chooses it, and when somebody else was faster on one of
    the machine's addresses it chooses again, *retries* times in all (once at least). With *wait_for_workers* it
    returns when all *world_size* callers are connected. *timeout*, in seconds, is the store's own limit as well.
    *use_libuv* is that of the server; None: as the environment variable ``USE_LIBUV`` says (1).

    Raises `ConfigError` (a ``ValueError``) for port -1 where others must know it, `RendezvousTimeoutError` (a
    ``TimeoutError``) when not all callers came, torch's ``DistNetworkError`` (a ``RuntimeError``) when the port
    is taken or nobody answers. (torch: ``torch.distributed.elastic.utils.distributed.create_c10d_store``)
    """
    if server_port == -1 and (world_size > 1 or not is_server):
        who = f"world_size={world_size} callers" if world_size > 1 else "a client (is_server=False)"
        raise ConfigError(f"server_port=-1 means any port, but {who} must know it: give server_port, such as 29500")
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

    libuv = os.environ.get("USE_LIBUV", "1") == "1" if use_libuv is None else use_libuv
    for left in range(max(retries, 1) - 1, -1, -1):
        try:
            store = TCPStore(
                server_addr,
                max(server_port, 0),
                world_size=world_size,
                is_master=is_server,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                use_libuv=libuv,
            )
            break
        except DistNetworkError as error:
            if server_port != -1 or not left or not any(word in str(error) for word in _TAKEN):
                raise
    if wait_for_workers:
        try:
            barrier(store, world_size, "elasticlib/members", timeout)
        except DistStoreError as error:
            raise RendezvousTimeoutError(
                f"not all of the {world_size} callers connected to the store at {store.host}:{store.port} "
                f"within {timeout:g} s"
            ) from error
    return store


__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
