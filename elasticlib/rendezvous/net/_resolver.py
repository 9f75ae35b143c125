"""
Numeric addresses of a host, within a time limit.

Rules of this file: the resolver of the C library has no time limit, so a process that can be killed
looks names up. That process runs without `QUIET_LOOKUPS`, which the host of a store sets for
itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from json import loads
from typing import Any

from attrs import frozen

from elasticlib.errors import RendezvousConnectionError
from elasticlib.processes import unseen_by_debugger
from elasticlib.rendezvous.net._endpoint import address_of

QUIET_LOOKUPS = "attempts:0"
"""
Value of RES_OPTIONS without queries to name servers: a TCPStore queries its peers' names, for
nothing.
"""

_LOOKUP = """
import json, socket, sys
try:
    found = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_STREAM)
except (socket.gaierror, UnicodeError) as error:
    print(json.dumps(getattr(error, "strerror", None) or str(error)))
else:
    print(json.dumps([[int(family), *place] for family, _, _, _, place in found]))
"""


@frozen
class Address:
    """One place where a host can be reached."""

    family: int
    """``socket.AF_INET`` or ``socket.AF_INET6``."""
    host: str
    """Numeric; with ``%zone`` where it needs one."""

    def place(self, port: int) -> tuple[Any, ...]:
        """Return the address with a port, as the socket module expects it."""
        if self.family != socket.AF_INET6:
            return self.host, port
        flags = socket.AI_NUMERICHOST  # no look-up: this only splits the zone off
        return socket.getaddrinfo(self.host, port, self.family, socket.SOCK_STREAM, flags=flags)[0][4]


def resolve(host: str, port: int, timeout: float) -> list[Address]:
    """
    Return the addresses of *host*, in the order of preference, at least one.

    Raises `RendezvousConnectionError` if there is none, or if the lookup takes more than *timeout*
    seconds.
    """
    address = address_of(host)
    if address is not None:
        is_ipv6 = address.version == 6
        # An IPv6 address as it was written, with its zone.
        return [Address(socket.AF_INET6, host) if is_ipv6 else Address(socket.AF_INET, str(address))]

    if host.lower() == "localhost":  # the same on every machine, hence the same for all who meet there
        return [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")]

    answer = _look_up(host, port, timeout)
    if isinstance(answer, str):
        raise RendezvousConnectionError(f"name not found: {host!r}: {answer}")

    found = [_address(*place) for place in answer]
    return list(dict.fromkeys(found))  # each once


def _look_up(host: str, port: int, timeout: float) -> Any:
    """
    Return the result of `_LOOKUP`: a list of families and addresses, or a text with the reason why
    there is none.
    """
    # Isolated and without site: the program's variables and packages cannot slow it down, or break
    # it.
    command = [sys.executable, "-I", "-S", "-c", _LOOKUP, host, str(port)]
    environment = dict(os.environ)

    # This program may host a store, which queries no name server; this lookup must.
    if environment.get("RES_OPTIONS") == QUIET_LOOKUPS:
        del environment["RES_OPTIONS"]
    try:
        with unseen_by_debugger():
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                # A process needs a moment to start, however little time is left.
                timeout=max(timeout, 0.1),
            )

        return loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"the name server did not answer within {timeout:.1f} s"
    except OSError as error:
        return f"no process can be started: {error}"
    except ValueError:
        return f"the look-up ended with exit status {done.returncode}"


def _address(family: int, host: str, port: int, flow: int = 0, zone: int = 0) -> Address:
    # A link-local address means nothing without its interface.
    if zone and "%" not in host:
        host = f"{host}%{zone}"
    return Address(family, host)
