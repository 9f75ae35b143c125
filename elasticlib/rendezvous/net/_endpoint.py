"""
The parts of a rendezvous endpoint: host, port, and the kind of host. Pure.

Rules of this file: text in, facts out; nothing is looked up. A host is kept as it was written,
without brackets.
"""

from __future__ import annotations

import ipaddress
import re

from elasticlib.errors import ConfigError

_NAME = re.compile(r"[\w.-]+")
_IN_BRACKETS = re.compile(r"\[(?P<host>[^]]*)\](:(?P<port>.*))?", re.DOTALL)
_PORT = re.compile(r"0{0,99}[0-9]{1,5}")
_SHORT = re.compile(r"(0x[0-9a-f]+|[0-9]+)(\.(0x[0-9a-f]+|[0-9]+)){0,3}", re.IGNORECASE)
"""An IPv4 address as name resolvers take it, too: with parts left out, octal or hexadecimal, such as 127.1."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """
    Return host and port of ``host``, ``host:port``, ``address``, ``[address]`` or ``[address]:port``.

    Blank text is ``localhost``. An IPv6 address needs its brackets only where a port follows: ``::1`` is an
    address here, where torch reads it as port 1 of the host ``:``. Raises `ConfigError`, a ValueError.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port

    _refuse_url(text)
    if text.startswith("["):
        return _parse_brackets(text, default_port)

    # Before the search for a colon: an IPv6 address has some of its own.
    if ":" not in text or address_of(text) is not None:
        _check_host(text, text)
        return text, default_port

    host, _, port = text.rpartition(":")
    _check_host(text, host)
    return host, _port(text, port)


def _refuse_url(endpoint: str) -> None:
    scheme = _SCHEME.match(endpoint)
    # etcd's users know endpoints as URLs: this names the part to keep.
    if scheme is None:
        return
    rest = endpoint[scheme.end() :].split("/")[0]
    raise _wrong(endpoint, f"it is a URL, not host:port; write {rest!r}")


def _parse_brackets(endpoint: str, default_port: int) -> tuple[str, int]:
    found = _IN_BRACKETS.fullmatch(endpoint)
    if found is None or not is_host(found["host"]):
        raise _wrong(endpoint, "brackets must contain one IP address, such as '[::1]:29400'")
    if found["port"] is None:
        return found["host"], default_port
    return found["host"], _port(endpoint, found["port"])


def _check_host(endpoint: str, host: str) -> None:
    """Raise `ConfigError` for an invalid *host* of an *endpoint*."""
    if is_host(host):
        return
    if not host:
        raise _wrong(endpoint, "the host is missing; write 'host:port', or 'localhost:port' for this machine alone")
    if ":" in host:
        raise _wrong(endpoint, "it contains too many colons; write 'host:port', or '[::1]:29400' for an IPv6 address")

    why = f"host {host!r} contains characters other than letters, digits, '.', '-' and '_'"
    if "/" in host:
        why += "; for a file on this machine add store_type=file to rdzv_configs (--rdzv-conf)"
    raise _wrong(endpoint, why)


def is_host(text: str) -> bool:
    """Return whether *text* can be a host's name, or is an address."""
    return _NAME.fullmatch(text) is not None or address_of(text) is not None


def is_loopback(host: str) -> bool:
    """Return whether *host* can only mean this machine, whatever a name server says."""
    address = address_of(host)
    if address is None:
        name = host.lower().rstrip(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")
    # ::ffff:127.0.0.1 is IPv4's loopback, which is_loopback does not see in every Python.
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the numeric address in *host*, in any form that resolvers accept; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if _SHORT.fullmatch(host):
            return _short_address(host)
        return None


def _short_address(host: str) -> ipaddress.IPv4Address | None:
    """Return the address of *host*, whose last part fills all missing ones."""
    try:
        *first, last = map(_number, host.split("."))
        octets = bytes(first) + last.to_bytes(4 - len(first), "big")
    except (ValueError, OverflowError):  # a part that is too large, or not a number, such as 09
        return None
    return ipaddress.IPv4Address(octets)


def _number(text: str) -> int:
    """Return the number that C reads in *text*: hexadecimal after 0x, octal after 0."""
    if text[:2].lower() == "0x":
        return int(text, 16)
    if text.startswith("0"):
        return int(text, 8)
    return int(text)


def spell(host: str, port: int) -> str:
    """Return ``host:port``, with brackets where they are needed."""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}"


def _port(endpoint: str, text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise _wrong(endpoint, f"port {text!r} is not a number from 0 to 65535")
    return int(text)


def _wrong(endpoint: str, why: str) -> ConfigError:
    return ConfigError.of_setting("rdzv_endpoint", f"{endpoint!r} is not an endpoint: {why}")
