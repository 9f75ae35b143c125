"""
What a rendezvous endpoint says: host and port, and what kind of host. Pure.

Rules of this file: text in, facts out; nothing is looked up. A host is kept as it was written, without brackets.
"""

from __future__ import annotations

import ipaddress
import re

from elasticlib.errors import ConfigError

DEFAULT_PORT = 29400

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"0{0,99}[0-9]{1,5}")
_SHORT = re.compile(r"(0x[0-9a-f]+|[0-9]+)(\.(0x[0-9a-f]+|[0-9]+)){0,3}", re.IGNORECASE)
"""An IPv4 address as name resolvers take it, too: with parts left out, octal or hexadecimal, such as 127.1."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """
    Host and port of ``host``, ``host:port``, ``address``, ``[address]`` or ``[address]:port``.

    Blank text is ``localhost``. An IPv6 address needs its brackets only where a port follows: ``::1`` is an
    address here, where torch reads it as port 1 of the host ``:``. Raises `ConfigError`, a ValueError.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    if scheme := _SCHEME.match(text):
        rest = text[scheme.end() :].split("/")[0]
        raise _wrong(text, f"it is a URL, not host:port; write {rest!r}")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        is_host = address_of(host) is not None or (_HOST.fullmatch(host) and ":" not in host)
        if not bracket or not is_host or (rest and not rest.startswith(":")):
            raise _wrong(text, "brackets hold one IP address, as in '[::1]:29400'")
        return host, _port(text, rest[1:]) if rest else default_port
    if address_of(text) is not None:
        return text, default_port
    host, colon, port = text.rpartition(":")
    if not colon:
        host = text
    if not host:
        raise _wrong(text, "the host is missing; write 'host:port', or 'localhost:port' for this machine alone")
    if ":" in host and address_of(host) is None:
        raise _wrong(text, "it holds too many colons; write 'host:port', an IPv6 address as in '[::1]:29400'")
    if not _HOST.fullmatch(host) and address_of(host) is None:
        more = "; for a file on this machine add store_type=file to rdzv_configs (--rdzv-conf)" if "/" in host else ""
        raise _wrong(text, f"host {host!r} has other characters than letters, digits, '.', '-' and '_'{more}")
    return host, _port(text, port) if colon else default_port


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant, whatever a name server says."""
    address = address_of(host)
    if address is None:
        name = host.lower().rstrip(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The numeric address that *host* spells out, in whatever form resolvers take; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _short_address(host) if _SHORT.fullmatch(host) else None


def _short_address(host: str) -> ipaddress.IPv4Address | None:
    """The address of *host*, whose last part stands for all that are missing."""
    *first, last = map(_number, host.split("."))
    missing = 4 - len(first)
    if any(part is None or part > 0xFF for part in first) or last is None or last >= 256**missing:
        return None
    octets = bytes(part for part in first if part is not None) + last.to_bytes(missing, "big")
    return ipaddress.IPv4Address(octets)


def _number(text: str) -> int | None:
    """A number as C writes it: hexadecimal after 0x, octal after 0."""
    base = 16 if text[:2].lower() == "0x" else 8 if text.startswith("0") else 10
    try:
        return int(text, base)
    except ValueError:  # such as 09
        return None


def spell(host: str, port: int) -> str:
    """``host:port``, with brackets where they are needed."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _port(endpoint: str, text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise _wrong(endpoint, f"port {text!r} is no number from 0 to 65535")
    return int(text)


def _wrong(endpoint: str, why: str) -> ConfigError:
    return ConfigError.of_setting("rdzv_endpoint", f"{endpoint!r} is no endpoint: {why}")
