"""
What a node brings to a round of somebody else's handler: as rank 0, also the workers' store.

Rules of this file: a store that served workers before is not offered again, for it may hold their keys.
"""

from __future__ import annotations

import socket
from typing import Any

from attrs import Factory, define

from elasticlib.rendezvous._names import host_name
from elasticlib.rendezvous.net._node_info import LOOPBACK, BoundNodeInfo
from elasticlib.rendezvous.protocol._messages import Descriptor


@define(eq=False)
class ThirdPartyNodeInfo:
    """Of the node that peers reach at *local_addr*, where that is known."""

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
        address = LOOPBACK if info.world_size == 1 else self.local_addr
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
