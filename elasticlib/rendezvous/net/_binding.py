"""
The listening socket of an endpoint, if the endpoint is on this machine.

Rules of this file: the kernel decides, by letting us bind or not; a name alone never does. A socket
is no wider than needed: one address is bound as that address, loopback as loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from attrs import frozen

from elasticlib.errors import ConfigError, RendezvousConnectionError
from elasticlib.processes import closed_in_forks
from elasticlib.rendezvous.net._endpoint import address_of, is_loopback, spell
from elasticlib.rendezvous.net._resolver import Address

BACKLOG = 4096
ANYWHERE = (Address(socket.AF_INET6, "::"), Address(socket.AF_INET, "0.0.0.0"))
_LOOPBACKS = (Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1"))
_FAR = (Address(socket.AF_INET, "192.0.2.1"), Address(socket.AF_INET6, "2001:db8::1"))
"""Addresses that are reserved for documentation: no machine has them."""
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV})


@frozen
class Elsewhere:
    """The endpoint is not on this machine."""

    why: str


@frozen
class Taken:
    """The endpoint is on this machine, and another process listens there."""

    why: str


def bind_endpoint(
    host: str, port: int, addresses: Sequence[Address], *, alone: bool = False
) -> socket.socket | Elsewhere | Taken:
    """
    Return the endpoint's listening socket, if it is on this machine and free.

    Nodes of a job that is *alone* on its node only come by the name: the socket is at its first
    address. Raises `ConfigError` for a forbidden port.
    """
    is_numeric = address_of(host) is not None
    if is_numeric or is_loopback(host):
        return listen(addresses, port)
    # For a numeric or loopback host the kernel alone decides; for a name, its addresses matter.
    outer = [address for address in addresses if not is_loopback(address.host)]
    if not outer:
        return _bind_loopback_name(host, port, addresses, alone)
    return _bind_outer_name(host, port, outer, addresses, alone)


def _bind_loopback_name(
    host: str, port: int, addresses: Sequence[Address], alone: bool
) -> socket.socket | Elsewhere | Taken:
    """
    Bind a name that only leads to loopback addresses; /etc/hosts often has such a line for a
    machine's own name.
    """
    own_name = socket.gethostname()
    # Every machine has loopback: only this machine's own name shows that this machine is meant.
    if _label(host) != _label(own_name):
        spelled = _spell_all(addresses)
        return Elsewhere(f"{host} resolves to {spelled} here, but this machine is called {own_name}")
    # Other machines find this one by the same name at another address.
    return listen(addresses if alone else ANYWHERE, port)


def _bind_outer_name(
    host: str, port: int, outer: Sequence[Address], addresses: Sequence[Address], alone: bool
) -> socket.socket | Elsewhere | Taken:
    """Bind a name that leads to the *outer* addresses; some of them may belong to this machine."""
    here = [address for address in outer if is_here(address)]
    if not here:
        return Elsewhere(f"{host} ({_spell_all(addresses)}) is not an address of this machine, {socket.gethostname()}")

    # One name for many machines: each finds itself under it, so all agree on the lowest address.
    lowest = min(outer, key=_order)
    if lowest not in here:
        why = "names several machines, and the store must be on the one with the lowest address, not on this one"
        return Elsewhere(f"{host} ({_spell_all(addresses)}) {why}")

    # Where the name leads here by several addresses, peers may come by any of them.
    if alone or len(here) == 1:
        return listen(here, port)

    return listen(ANYWHERE, port)


def listen(addresses: Sequence[Address], port: int) -> socket.socket | Elsewhere | Taken:
    """Return a socket that listens at the first of the addresses that this machine has."""
    for address in addresses:
        try:
            return _listen(address, port)
        except OSError as error:
            # This machine lacks that address, or that family: another address may be its own.
            if error.errno in _ABSENT:
                continue
            place = spell(address.host, port)
            if error.errno == errno.EADDRINUSE:
                return Taken(f"another process already listens on {place} of this machine")
            raise _refusal(place, error) from error

    return Elsewhere(f"{_spell_all(addresses)} is not an address of this machine, {socket.gethostname()}")


def _refusal(place: str, error: OSError) -> ConfigError | RendezvousConnectionError:
    if error.errno in (errno.EACCES, errno.EPERM):
        why = f"this user cannot listen on {place}: {os.strerror(error.errno)}"
        return ConfigError(f"{why}; choose a port above 1023")
    return RendezvousConnectionError(f"cannot listen on {place}: {os.strerror(error.errno or 0)}")


def loopback() -> str:
    """Return the address at which this machine reaches itself: IPv4's, or IPv6's without IPv4."""
    return next((each.host for each in _LOOPBACKS if is_here(each)), _LOOPBACKS[0].host)


def outward_address() -> str | None:
    """Return this machine's address on its way to the outside; None without a default route."""
    return next(filter(None, map(address_towards, _FAR)), None)


def address_towards(far: Address) -> str | None:
    """Return this machine's address on its way to *far*; None without a route."""
    with suppress(OSError), socket.socket(far.family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket this sends nothing: the kernel only picks a route.
        probe.connect(far.place(9))
        return str(probe.getsockname()[0])
    return None


def _listen(address: Address, port: int) -> socket.socket:
    listener = closed_in_forks(socket.socket(address.family, socket.SOCK_STREAM))
    try:
        # Connections of a predecessor that are still in TIME_WAIT do not keep its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            # Only the address of all interfaces includes IPv4, whatever this machine's default is.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.host != "::")
        listener.bind(address.place(port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise

    return listener


def is_here(address: Address) -> bool:
    """Return whether this machine has the address."""
    with suppress(OSError), socket.socket(address.family, socket.SOCK_STREAM) as probe:
        probe.bind(address.place(0))
        return True
    return False


def _spell_all(addresses: Sequence[Address]) -> str:
    return ", ".join(address.host for address in addresses)


def _order(address: Address) -> tuple[int, int]:
    number = ipaddress.ip_address(address.host)
    return number.version, int(number)


def _label(host: str) -> str:
    return host.lower().split(".")[0]
