"""
Hosts of the engine `Ssh`, from names and from host files of DeepSpeed and Open MPI. Pure.

Rules of this file: a line of a host file is ``host``, ``host slots=8`` or ``host slots=8 max_slots=8``; ``#`` begins a
comment. A host is ``[user@]name[:port]``; an IPv6 address with a port is in brackets. Each host has one agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

from elasticlib.errors import ConfigError

_HOST = re.compile(
    r"""
    (?!-)                                   # ssh would take it for an option
    (?:(?P<user>[^@\s\[\]]+)@)?
    (?:\[(?P<six>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\]|(?P<name>(?!-)[^@:\s\[\]]+))
    (?::(?P<port>\d{1,9}))?
    """,
    re.VERBOSE | re.ASCII,
)
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")
_LARGEST_PORT = 65535
_NUMBERS = ("slots", "max_slots", "max-slots")


@frozen
class SshHost:
    """One host."""

    name: str
    user: str = ""
    port: int = 0
    """0 for ssh's own choice."""
    slots: int = 0
    """Number of workers; 0 if the launch's settings give it."""

    @property
    def destination(self) -> str:
        """The destination on ssh's command line."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{name}:{self.port}" if self.port else name


def parse_host(text: str, slots: int = 0) -> SshHost:
    """Return the host of *text*. Raises `ConfigError`."""
    if _BARE_IPV6.fullmatch(text):
        return SshHost(text, slots=slots)

    found = _HOST.fullmatch(text)
    if found is None:
        raise _error(text, "is not a host: write h1, user@h1 or h1:2222")

    parts = found.groupdict(default="")
    return SshHost(
        name=parts["six"] or parts["name"],
        user=parts["user"],
        port=_port_of(text, parts["port"] or "0"),
        slots=slots,
    )


def _port_of(text: str, digits: str) -> int:
    port = int(digits)
    if port > _LARGEST_PORT:
        raise _error(text, f"has port {port}: the largest one is {_LARGEST_PORT}")
    return port


def parse_hostfile(text: str, path: str) -> list[SshHost]:
    """Return the hosts of the *text* of the file *path*. Raises `ConfigError` that names the line."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(parse_host(words[0], _slots(words[1:], f"{path}:{number}")))
    return hosts


def _slots(settings: Iterable[str], where: str) -> int:
    """Return the number of ``slots=8`` among the *settings* of a line; 0 without it."""
    slots = 0
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in _NUMBERS or not re.fullmatch("[1-9][0-9]{0,5}", value):
            raise _error(setting, f"is not a setting of a host ({where}): write slots=8 or max_slots=8")
        if name == "slots":
            slots = int(value)
    return slots


def check_hosts(hosts: Iterable[SshHost], where: str) -> tuple[SshHost, ...]:
    """Return *hosts*. Raises `ConfigError` if there is none, or one twice."""
    found = tuple(hosts)
    if not found:
        raise ConfigError.of_setting("hosts", f"{where} names no host: give at least one")

    seen = set[tuple[str, int]]()
    for host in found:
        if (host.name, host.port) in seen:
            raise _error(str(host), "is given twice: a host has one agent; write slots=8 for 8 workers")
        seen.add((host.name, host.port))
    return found


def _error(text: str, complaint: str) -> ConfigError:
    return ConfigError.of_setting("hosts", f"{text[:80]!r} {complaint}")
