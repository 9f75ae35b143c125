"""
The operations that the etcd backend needs from a server.

Rules of this file: the contract, and the names of the keys. A path looks like a file's. A *version*
grows with every change anywhere in the store, so that versions order all changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

from attrs import frozen

KEEP = 7200
"""
Seconds that a job's keys outlive its last sign of life: nothing may stay without end in a shared
cluster.
"""

RAISE = "start etcd with a larger --max-request-bytes"
"""Advice for a request that is too large and cannot be shortened."""


@frozen
class KeyFound:
    """A key with its value."""

    path: str
    data: bytes
    version: int
    """Version of its last change."""
    born: int
    """Version of its creation."""


@frozen
class RenewedKey:
    """A key that is ours as long as we renew it."""

    path: str
    token: str
    """Its value: different from that of any other hold."""
    born: int
    lease: int
    ttl: float
    """Seconds without renewal after which it is gone."""


class Keys(Protocol):
    """
    One thread's connection. Trouble with the server raises `RendezvousConnectionError`.

    With a *hold*, the same transaction checks that it is still ours, as far as the API can, or
    raises `LeadershipLost`.
    """

    def read(self, paths: Sequence[str]) -> tuple[list[KeyFound | None], int]:
        """Return the keys, in order, and a version since which `changed` misses nothing."""

    def write(self, values: Mapping[str, bytes], hold: RenewedKey | None = None) -> None:
        """Set all keys."""

    def append(self, folder: str, data: bytes) -> None:
        """Create a new key in the folder."""

    def entries(self, folder: str, after: int) -> tuple[list[KeyFound], int]:
        """
        Return the keys of the folder that were born after that version, oldest first; and a version
        for `changed`.
        """

    def swap(self, path: str, data: bytes, version: int, hold: RenewedKey | None = None) -> int | None:
        """
        Set the key if it is at *version* (0: missing), and still held; return its new version, or
        None.
        """

    def delete(self, paths: Sequence[str], hold: RenewedKey | None = None) -> None:
        """Delete keys; missing ones are ignored."""

    def clear(self, folder: str, hold: RenewedKey | None = None) -> None:
        """Delete all keys in the folder."""

    def changed(self, path: str, since: int, timeout: float, folder: bool = False) -> None:
        """
        Return when the key, or one in the folder, changed since that version; or earlier, at the
        latest after *timeout*.
        """

    def seize(self, path: str, name: str, ttl: float) -> RenewedKey | None:
        """Create the key if it is missing, for at least *ttl* seconds."""

    def renew(self, hold: RenewedKey) -> bool:
        """Extend the hold for another time to live; return whether it was still ours."""

    def holds(self, hold: RenewedKey) -> bool:
        """Return whether the key is still ours."""

    def release(self, hold: RenewedKey) -> None:
        """Delete the key now, if it is still ours."""

    def keep(self, folder: str) -> None:
        """
        Extend the life of all keys in the folder, of any connection, to `KEEP` seconds from now.
        """

    def clone(self) -> Keys:
        """Return another connection."""

    def interrupt(self) -> None:
        """End the wait of another thread in `changed`, and every later one."""

    def close(self) -> None:
        """Give the connection up; may be called twice."""


def component(name: str) -> str:
    """Return any text as one part of a path."""
    quoted = quote(name, safe="", errors="surrogatepass")
    if not quoted:
        return "%"
    # No part is hidden, or a path to another folder, in programs that show keys as files.
    if quoted.startswith(("_", ".")):
        return f"%{ord(quoted[0]):02X}{quoted[1:]}"
    return quoted
