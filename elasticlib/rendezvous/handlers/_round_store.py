"""
The store of one round, for a program that calls its handler itself: hosted by group rank 0, reached by all.

Rules of this file: a socket that is bound already is served, never a port that was free a moment ago; torch is
imported here only, when the first round is seated.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from elasticlib.errors import RendezvousConnectionError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PATIENCE = 60.0
"""Seconds that a client waits for the server, and for a key that nobody has written."""
_PROBE = 1.0
"""Seconds that an address of the store gets to answer, where there are several."""


def serve(listener: socket.socket, address: str) -> Store:
    """A store on *listener*, which becomes its own; it ends with the last reference to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    with _as_connection_error(address, port):
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=datetime.timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def reach(addresses: Sequence[str], port: int) -> tuple[Store, str]:
    """The store at the first of *addresses* that answers, and which one that was."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = first_reachable(addresses, port)
    with _as_connection_error(address, port):
        store = TCPStore(
            address,
            port,
            is_master=False,
            timeout=datetime.timedelta(seconds=PATIENCE),
            wait_for_workers=False,
        )
    return store, address


def apart(store: Store, run_id: str, round: int) -> Store:
    """The same store with keys of this round alone, named as torch names them."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"torch.rendezvous.{run_id}.{round}", store)


def first_reachable(addresses: Sequence[str], port: int) -> str:
    """The first address where somebody accepts; the only or first one when nobody does: its error says why."""
    for address in addresses if len(addresses) > 1 else ():
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE):
            return address
    return addresses[0]


@contextlib.contextmanager
def _as_connection_error(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's store errors are
        why = str(error).splitlines()[0]
        raise RendezvousConnectionError(
            f"the store of the round at {address}:{port} cannot be reached: {why}"
        ) from error
