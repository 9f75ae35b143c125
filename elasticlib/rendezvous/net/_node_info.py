"""
The descriptor of a node for a round: a bound socket for the workers' store, and the node's
addresses.

Rules of this file: each round gets a new socket. It is on loopback if the whole job is on this
machine. Otherwise it listens on all interfaces, since peers may reach this machine through any of
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable

from attrs import define, frozen

from elasticlib.processes import closed_in_forks, room_for_descriptors
from elasticlib.rendezvous.net._binding import loopback
from elasticlib.rendezvous.protocol._messages import Descriptor

_BACKLOG = 2048
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_GLOBAL_SCOPE = "00"


@define(eq=False)
class BoundNodeInfo:
    """
    Binds a socket for each round; `address` returns this machine's address for peers, once it is
    known.
    """

    address: Callable[[], str] = loopback
    port: int = 0
    """Port to bind; 0 for any."""
    index: int | None = None
    hosts: Callable[[], bool] = lambda: False
    """Return whether this node hosts the job's store."""
    work: str = ""
    """The program of the workers."""
    command: str = ""
    """The program with its arguments."""
    presence_port: int = 0
    """Port of this node's presence socket; 0: it has none."""
    _listener: socket.socket | None = None

    def describe(self, slots: int, role: str) -> Descriptor:
        """Bind a socket for the next round and return its descriptor."""
        # Another node may have had group rank 0 in the round before: this node's socket was not
        # used.
        if (unused := self.listener()) is not None:
            unused.close()
        # A caller whose own files fill its limit can enter the next round all the same.
        with room_for_descriptors(4):
            first = self.address()
            listener, others = listening_socket(first, self.port)
            self._listener = closed_in_forks(listener)
        port = self._listener.getsockname()[1]
        addresses = (first, *others)
        known = self.index, self.hosts(), self.work, self.command
        return Descriptor(slots, role, addresses, port, *known, presence_port=self.presence_port)

    def listener(self) -> socket.socket | None:
        """Return the socket that was bound last, once."""
        listener, self._listener = self._listener, None
        return listener


@frozen
class FixedNodeInfo:
    """Descriptor of a node whose workers use the job's own store; no socket is bound."""

    address: str
    port: Callable[[], int]
    index: int | None
    hosts: Callable[[], bool]
    work: str = ""
    command: str = ""
    is_scheduled: bool = False
    """True if a scheduler set `index`."""
    presence_port: int = 0
    """Port of this node's presence socket; 0: it has none."""
    own_address: Callable[[], str] = loopback
    """Returns this machine's address for peers: `address` is that of the store, which may be on another machine."""

    def describe(self, slots: int, role: str) -> Descriptor:
        """Return the same descriptor for each round."""
        known = self.index, self.hosts(), self.work, self.command, self.is_scheduled
        presence = (self.presence_port, self.own_address()) if self.presence_port else ()
        return Descriptor(slots, role, (self.address,), self.port(), *known, *presence)

    def listener(self) -> socket.socket | None:
        """Return None: no socket is bound."""
        return None


def listening_socket(address: str, port: int) -> tuple[socket.socket, tuple[str, ...]]:
    """Return a listening socket for *address*, and the other addresses that it serves."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=_BACKLOG), ()
    # On all interfaces: peers may reach this machine through an address that it does not know.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    everywhere = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    return everywhere, tuple(other for other in own_addresses(ipv6=dual) if other != address)


def own_addresses(*, ipv6: bool) -> list[str]:
    """
    Return the addresses of this machine's interfaces, IPv4 first, without loopback and link-local
    ones.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                # By ioctl: Python has no other way to an interface's addresses without a further
                # package.
                answer = fcntl.ioctl(sock, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))

    if ipv6:
        with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
            found += [str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows if row[3] == _GLOBAL_SCOPE]

    # A peer would reach itself at a loopback address.
    return [each for each in found if not ipaddress.ip_address(each).is_loopback]
