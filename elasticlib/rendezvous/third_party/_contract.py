"""
The contract with a third-party rendezvous handler: its methods, its errors, and this node's
descriptor.

Rules of this file: a handler is known by its methods, and an error by the names of its classes. So
nothing of torch's own launcher needs to be imported. A store that served workers before is not
offered again, for it may hold their keys.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, evolve

from elasticlib.errors import ConfigError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous._names import host_name
from elasticlib.rendezvous.net._binding import loopback
from elasticlib.rendezvous.net._node_info import BoundNodeInfo
from elasticlib.rendezvous.protocol._messages import Descriptor, Final

if TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._base import RendezvousHandler

METHODS = ("next_rendezvous", "is_closed", "set_closed", "num_nodes_waiting", "shutdown")
_FINALS = {
    "RendezvousGracefulExitError": Final(True, ""),
    "RendezvousClosedError": Final(False, "", kind="closed"),
    "RendezvousTimeoutError": Final(False, "", kind="timeout"),
}
"""Exceptions that end this node's part, by the names of their classes."""
_ERRORS: tuple[type[RendezvousError], ...] = (RendezvousConnectionError, RendezvousStateError)
"""Exceptions that keep their class."""


def checked_handler(handler: Any) -> RendezvousHandler:
    """
    Return the same handler; only its `METHODS` are called. Raises `ConfigError` if it lacks one of
    them.
    """
    missing = [name for name in METHODS if not callable(getattr(handler, name, None))]
    if missing:
        raise ConfigError(f"rdzv_handler={handler!r} is not a rendezvous handler: it lacks {', '.join(missing)}")
    found: RendezvousHandler = handler
    return found


def meaning(error: Exception, handler: object) -> Final | RendezvousError:
    """
    Return the meaning for this node of a handler's exception, which is known by the names of its
    classes.
    """
    # By name: torch's own classes are never imported, and a handler may have classes of its own below them.
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error) or type(error).__name__
    for name, final in _FINALS.items():
        if name in names:
            return evolve(final, why=text)

    if isinstance(error, RendezvousError):
        return error

    known = (each for each in _ERRORS if each.__name__ in names)
    kind = next(known, RendezvousError)

    # The agent raises it elsewhere, where its origin would be unknown without this text.
    raised = kind(f"{type(handler).__name__} raised {type(error).__name__}: {text}")
    raised.__cause__ = error
    return raised


@define(eq=False)
class ThirdPartyNodeInfo:
    """
    Descriptor of a node for a round: for rank 0, also the workers' store. Peers reach it at
    *local_addr*, if known.
    """

    local_addr: str | None
    _served: set[tuple[str, int]] = Factory(set)
    """Addresses of the handler's own stores that workers have used."""
    _bound: BoundNodeInfo | None = None

    def describe(self, info: Any, *, shares: bool, slots: int, role: str) -> Descriptor:
        """
        Return the description of this node for the round *info* of the handler.

        *shares*: workers may use the store that it names.
        """
        self.drop()
        if info.rank != 0:
            return Descriptor(slots, role, (host_name(self.local_addr),), 0)

        shared = info.bootstrap_store_info
        if shares and shared is not None:
            place = (str(shared.master_addr), int(shared.master_port))
            if self._is_fresh(place):
                return Descriptor(slots, role, place[:1], place[1])

        address = self._address(info.world_size, shared)
        self._bound = BoundNodeInfo(lambda: address)
        return self._bound.describe(slots, role)

    def _is_fresh(self, place: tuple[str, int]) -> bool:
        """Return whether no workers used the store at *place* so far, and note that some do now."""
        if place in self._served:
            return False
        self._served.add(place)
        return True

    def _address(self, world_size: int, shared: Any) -> str:
        """Return the address at which peers reach a store of this node."""
        if world_size == 1:
            return loopback()
        if self.local_addr is not None:
            return self.local_addr
        if shared is not None:
            # Rank 0 hosts the handler's own store, too.
            return str(shared.master_addr)
        return socket.getfqdn()

    def listener(self) -> socket.socket | None:
        """
        Return the socket that was bound for the last round, once; None if another store serves the
        workers.
        """
        if self._bound is None:
            return None
        return self._bound.listener()

    def drop(self) -> None:
        """Close the bound socket if it was not taken."""
        listener = self.listener()
        if listener is not None:
            listener.close()
        self._bound = None
