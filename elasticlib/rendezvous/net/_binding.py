"""
Whether an endpoint is on this machine, and the listening socket if it is.

Rules of this file: the kernel decides, by letting us bind or not; a name alone never does. No wider than needed:
one address is bound as that address, loopback as loopback.
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
"""Addresses that are kept for documentation: no machine has them."""
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV})


@frozen
class Elsewhere:
    """The endpoint is not on this machine."""

    why: str


@frozen
class Taken:
    """The endpoint is on this machine, and somebody listens there."""

    why: str


def bind_endpoint(
    host: str, port: int, addresses: Sequence[Address], *, alone: bool = False
) -> socket.socket | Elsewhere | Taken:
    """
    The endpoint's listening socket, if it is on this machine and free. Raises `ConfigError` for a forbidden port.

    A job that is *alone* on its node awaits nobody by another way than the name: the socket is at its first address.
    """
    if is_loopback(host) or address_of(host) is not None:
        return listen(addresses, port)
    outer = [address for address in addresses if not is_loopback(address.host)]
    spelled = ", ".join(address.host for address in addresses)
    if not outer:
        if _label(host) != _label(socket.gethostname()):
            return Elsewhere(f"{host} resolves to {spelled} here, but this machine is called {socket.gethostname()}")
        return listen(addresses if alone else ANYWHERE, port)
    here = [address for address in outer if is_here(address)]
    if not here:
        return Elsewhere(f"{host} ({spelled}) is no address of this machine, {socket.gethostname()}")
    if len(here) < len(outer) and min(outer, key=_order) not in here:
        # One name for many machines: each finds itself under it, so all agree on the lowest address.
        return Elsewhere(f"{host} ({spelled}) names several machines, and the lowest address is another one's")
    return listen(here if alone or len(here) == 1 else ANYWHERE, port)


def listen(addresses: Sequence[Address], port: int) -> socket.socket | Elsewhere | Taken:
    """A socket that listens at the first of the addresses that this machine has."""
    for address in addresses:
        try:
            return _listen(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Taken(f"another process listens at {spell(address.host, port)} of this machine already")
            if error.errno in (errno.EACCES, errno.EPERM):
                why = f"this user may not listen at {spell(address.host, port)}: {os.strerror(error.errno)}"
                raise ConfigError(f"{why}; choose a port above 1023") from error
            if error.errno not in _ABSENT:
                why = f"cannot listen at {spell(address.host, port)}: {os.strerror(error.errno or 0)}"
                raise RendezvousConnectionError(why) from error
    spelled = ", ".join(address.host for address in addresses)
    return Elsewhere(f"{spelled} is no address of this machine, {socket.gethostname()}")


def loopback() -> str:
    """Where this machine reaches itself: by IPv4 unless it has IPv6 alone."""
    return next((each.host for each in _LOOPBACKS if is_here(each)), _LOOPBACKS[0].host)


def outward_address() -> str | None:
    """Address of this machine on its way to the rest of the world; None without a default route."""
    return next(filter(None, map(address_towards, _FAR)), None)


def address_towards(far: Address) -> str | None:
    """Address of this machine on its way to that one; None without a route."""
    with suppress(OSError), socket.socket(far.family, socket.SOCK_DGRAM) as probe:
        probe.connect(far.place(9))  # for a datagram socket that only picks a route
        return str(probe.getsockname()[0])
    return None


def _listen(address: Address, port: int) -> socket.socket:
    listener = closed_in_forks(socket.socket(address.family, socket.SOCK_STREAM))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.host != "::")
        listener.bind(address.place(port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_here(address: Address) -> bool:
    """Whether this machine has the address."""
    with suppress(OSError), socket.socket(address.family, socket.SOCK_STREAM) as probe:
        probe.bind(address.place(0))
        return True
    return False


def _order(address: Address) -> tuple[int, int]:
    number = ipaddress.ip_address(address.host)
    return number.version, int(number)


def _label(host: str) -> str:
    return host.lower().split(".")[0]
