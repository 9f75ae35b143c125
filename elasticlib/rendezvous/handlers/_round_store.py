"""
The store of one round, for a program that calls its handler itself: hosted by group rank 0, reached
by all.

Rules of this file: it serves a socket that is bound already, never a port that was free a moment
ago. torch is only imported here, when the first round begins.
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
from elasticlib.rendezvous.protocol._messages import RankAssignment

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_CONNECT = 60.0
"""Seconds that a client waits for the server."""
_TCP_TIMEOUT = 60.0
_OTHER_TIMEOUT = 300.0
"""Seconds for a missing key, if torch's store would be one of another backend than c10d."""
_PROBE = 1.0
"""Seconds that an address of the store has to answer, if there are several."""


def prepare() -> None:
    """Import slow modules; nothing is contacted."""
    import torch.distributed  # noqa: F401


def timeout_of(job: NodeJob) -> float:
    """
    Return the seconds that the store of a round of *job* waits for a key: the same as in torch with
    that backend.
    """
    if job.backend in STATIC:
        return job.join_timeout
    if job.backend == "c10d" and job.store_type == "tcp":
        return float(job.options.get("read_timeout", _TCP_TIMEOUT))
    return _OTHER_TIMEOUT


def open_store(job: NodeJob, assignment: RankAssignment, listener: socket.socket | None) -> tuple[Store, str]:
    """
    Return the store of a round, and the address at which the peers reach it: served on *listener*
    if given, else connected to.
    """
    timeout = timeout_of(job)
    if listener is None:
        return reach(assignment.master_addresses, assignment.master_port, timeout)
    address = assignment.master_addresses[0]
    return serve(listener, _own_address(listener, address), timeout), address


def serve(listener: socket.socket, address: str, timeout: float) -> Store:
    """
    Return a store on *listener*, which it owns from then on; it ends with the last reference to it.
    """
    return _store(address, listener.getsockname()[1], timeout, listener.detach())


def reach(addresses: Sequence[str], port: int, timeout: float) -> tuple[Store, str]:
    """Return the store at the first of *addresses* that answers, and that address."""
    address = first_reachable(addresses, port)
    return _store(address, port, timeout), address


def apart(store: Store, run_id: str, round: int) -> Store:
    """Return the same store with keys of this round alone, named as in torch."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"torch.rendezvous.{run_id}.{round}", store)


def first_reachable(addresses: Sequence[str], port: int) -> str:
    """
    Return the first address that accepts a connection.

    If none does, return the only or first address: its error then has the reason.
    """
    # A single address is not probed: connecting to it has the same result, and costs no time.
    for address in addresses if len(addresses) > 1 else ():
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE):
            return address
    return addresses[0]


def _own_address(listener: socket.socket, address: str) -> str:
    """Return the address at which this process reaches *listener*, without any name lookup."""
    host = str(listener.getsockname()[0])
    # A socket on all addresses has none to connect to: loopback reaches it.
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host) or address


def _store(address: str, port: int, timeout: float, listener: int | None = None) -> Store:
    """
    Return a store at this place: served on the descriptor *listener* if given, else connected to.
    """
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
