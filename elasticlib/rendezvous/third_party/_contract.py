"""
What is expected of somebody else's rendezvous handler, what its errors mean, and what a node brings to its rounds.

Rules of this file: a handler is known by its methods and an error by the names of its classes, so that nothing
of torch's own launcher needs to be imported. A store that served workers before is not offered again, for it may hold
their keys.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from attrs import Factory, define

from elasticlib.errors import ConfigError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous._names import host_name
from elasticlib.rendezvous.net._binding import loopback
from elasticlib.rendezvous.net._node_info import BoundNodeInfo
from elasticlib.rendezvous.protocol._messages import Descriptor, Final

if TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._base import RendezvousHandler

METHODS = ("next_rendezvous", "is_closed", "set_closed", "num_nodes_waiting", "shutdown")


def checked_handler(handler: Any) -> RendezvousHandler:
    """The same handler, of which no more than `METHODS` are called; raises `ConfigError` when it is none."""
    if missing := [name for name in METHODS if not callable(getattr(handler, name, None))]:
        raise ConfigError(f"rdzv_handler={handler!r} is no rendezvous handler: it has no {', '.join(missing)}")
    found: RendezvousHandler = handler
    return found


def meaning(error: Exception, handler: object) -> Final | RendezvousError:
    """What an exception of a handler, known by the names of its classes, means for this node."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error) or type(error).__name__
    if "RendezvousGracefulExitError" in names:
        return Final(True, text)
    if "RendezvousClosedError" in names:
        return Final(False, text, kind="closed")
    if "RendezvousTimeoutError" in names:
        return Final(False, text, kind="timeout")
    if isinstance(error, RendezvousError):
        return error
    kinds = (RendezvousConnectionError, RendezvousStateError)
    kind = next((each for each in kinds if each.__name__ in names), RendezvousError)
    told = kind(f"{type(handler).__name__} raised {type(error).__name__}: {text}")
    told.__cause__ = error
    return told


@define(eq=False)
class ThirdPartyNodeInfo:
    """What a node brings to a round: as rank 0, also the workers' store. Peers reach it at *local_addr*, if known."""

    local_addr: str | None
    _served: set[tuple[str, int]] = Factory(set)
    """Addresses of the handler's own stores that workers have used."""
    _bound: BoundNodeInfo | None = None

    def describe(self, info: Any, *, shares: bool, slots: int, role: str) -> Descriptor:
        """For the round that the handler told by *info*; *shares*: workers may use the store of which it tells."""
        self.drop()
        if info.rank != 0:
            return Descriptor(slots, role, (host_name(self.local_addr),), 0)
        shared = info.bootstrap_store_info
        if shares and shared is not None:
            place = (str(shared.master_addr), int(shared.master_port))
            if place not in self._served:
                self._served.add(place)
                return Descriptor(slots, role, place[:1], place[1])
        address = loopback() if info.world_size == 1 else self.local_addr
        if address is None:
            address = str(shared.master_addr) if shared is not None else socket.getfqdn()
        self._bound = BoundNodeInfo(lambda: address)
        return self._bound.describe(slots, role)

    def listener(self) -> socket.socket | None:
        """The socket that was bound for the last round, once; None where another store serves the workers."""
        return self._bound.listener() if self._bound is not None else None

    def drop(self) -> None:
        """Free what was bound and not taken."""
        if (listener := self.listener()) is not None:
            listener.close()
        self._bound = None
