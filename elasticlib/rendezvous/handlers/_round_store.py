"""
The store of one round, for a program that calls its handler itself: hosted by group rank 0, reached by all.

Rules of this file: a socket that is bound already is served, never a port that was free a moment ago; torch is
imported here only, when the first round begins.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._rdzv_options import STATIC

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_CONNECT = 60.0
"""Seconds that a client waits for the server."""
_TCP_TIMEOUT = 60.0
_OTHER_TIMEOUT = 300.0
"""Seconds for a key that nobody has written, where torch's store would be one of c10d's own, and another one."""
_PROBE = 1.0
"""Seconds that an address of the store gets to answer, where there are several."""


def prepare() -> None:
    """Import what takes long; nothing is contacted."""
    import torch.distributed  # noqa: F401


def timeout_of(job: NodeJob) -> float:
    """Seconds that the store of a round of *job* waits for a key: as long as torch's does with the same back end."""
    if job.backend in STATIC:
        return job.join_timeout
    if job.backend == "c10d" and job.store_type == "tcp":
        return float(job.options.get("read_timeout", _TCP_TIMEOUT))
    return _OTHER_TIMEOUT


def serve(listener: socket.socket, address: str, timeout: float) -> Store:
    """A store on *listener*, which becomes its own; it ends with the last reference to it."""
    return _store(address, listener.getsockname()[1], timeout, listener.detach())


def reach(addresses: Sequence[str], port: int, timeout: float) -> tuple[Store, str]:
    """The store at the first of *addresses* that answers, and which one that was."""
    address = first_reachable(addresses, port)
    return _store(address, port, timeout), address


def apart(store: Store, run_id: str, round: int) -> Store:
    """The same store with keys of this round alone, named as torch names them."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"torch.rendezvous.{run_id}.{round}", store)


def first_reachable(addresses: Sequence[str], port: int) -> str:
    """The first address where somebody accepts; the only or first one when nobody does: its error says why."""
    # A single address is not probed: connecting to it says the same, and costs no time.
    for address in addresses if len(addresses) > 1 else ():
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE):
            return address
    return addresses[0]


def _store(address: str, port: int, timeout: float, listener: int | None = None) -> Store:
    """The store there: served on the descriptor *listener* where that is given, else reached."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=_CONNECT)
    # The server takes the descriptor over: the port was never free in between.
    hosts = listener is not None
    try:
        store = TCPStore(
            address, port, is_master=hosts, timeout=limit, wait_for_workers=False, master_listen_fd=listener
        )
    except RuntimeError as error:  # torch's store errors are
        why = str(error).splitlines()[0]
        raise RendezvousConnectionError(
            f"the store of the round at {address}:{port} cannot be reached: {why}"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=timeout))
    return store
