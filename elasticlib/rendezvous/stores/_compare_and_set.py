"""
The exchange of one job over etcd's keys.

    <prefix>/job_<run id>/inbox/*     messages, in the order of their creation
                          keys/*      everything else that an exchange writes
                          leader      who coordinates; ends with its holder's lease
                          state       what the coordinator wrote down

Rules of this file: a long wait is many short ones, so that a server that is gone is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from elasticlib.rendezvous.protocol._exchange import Posted
from elasticlib.rendezvous.stores._keys import Hold, Item, Keys, component

SLICE = 20.0
"""Seconds after which a wait looks again by itself."""


def key_path(root: str, key: str) -> str:
    """Where an exchange's key lies."""
    return f"{root}/keys/{component(key)}"


class CompareAndSetExchange:
    """One connection; the contract is that of `Exchange`."""

    def __init__(
        self, keys: Keys, root: str, hold: Hold | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        """With a *hold*, writing and deleting need it, and *check* is called before."""
        self._keys = keys
        self._root = root
        self._inbox = f"{root}/inbox"
        self._hold = hold
        self._check = check
        self._received = 0
        self._found: tuple[str, bytes] | None = None
        """What the last wait has found, and nobody has read yet."""
        self._paths: dict[int, str] = {}

    def post(self, data: bytes) -> None:
        """Append an entry to the inbox."""
        self._keys.append(self._inbox, data)

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        """Entries not received yet; waits at most *timeout* seconds for the first one."""
        found: list[Item] = []

        def look() -> int | None:
            found[:], version = self._keys.entries(self._inbox, self._received)
            return None if found else version

        self._await(look, self._inbox, timeout, folder=True)
        for item in found:
            self._received = item.born
            self._paths[item.born] = item.path
        return [Posted(item.born, item.data) for item in found]

    def discard(self, entries: Sequence[Posted]) -> None:
        """Delete entries that this connection received."""
        self._check()
        paths = [self._paths.pop(entry.number) for entry in entries if entry.number in self._paths]
        if paths:
            self._keys.delete(paths, self._hold)

    def write(self, values: Mapping[str, bytes]) -> None:
        """Write all values."""
        self._check()
        self._found = None
        if values:
            self._keys.write({self._path(key): data for key, data in values.items()}, self._hold)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, or None."""
        paths, found = [self._path(key) for key in keys], self._found
        self._found = None
        if found is not None and [found[0]] == paths:  # who waits for a key reads it next: one request for both
            return [found[1]]
        items, _ = self._keys.read(paths)
        return [None if item is None else item.data for item in items]

    def wait(self, key: str, timeout: float | None) -> bool:
        """Block until the key is there, at most *timeout* seconds; whether it was."""
        path, self._found = self._path(key), None

        def look() -> int | None:
            (item,), version = self._keys.read([path])
            self._found = None if item is None else (path, item.data)
            return None if item is not None else version

        return self._await(look, path, timeout, folder=False)

    def delete(self, keys: Sequence[str]) -> None:
        """Forget the keys."""
        self._check()
        self._found = None
        if keys:
            self._keys.delete([self._path(key) for key in keys], self._hold)

    def clear_foreign(self) -> None:
        """Nothing: workers never share etcd."""

    def clone(self) -> CompareAndSetExchange:
        """Another connection to the same server."""
        return CompareAndSetExchange(self._keys.clone(), self._root, self._hold, self._check)

    def close(self) -> None:
        """Give the connection up."""
        self._keys.close()

    def _path(self, key: str) -> str:
        return key_path(self._root, key)

    def _await(self, look: Callable[[], int | None], path: str, timeout: float | None, folder: bool) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (version := look()) is not None:
            left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            if left <= 0:
                return False
            self._keys.changed(path, version, left, folder)
        return True
