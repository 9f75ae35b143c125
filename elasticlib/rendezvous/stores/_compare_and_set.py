"""
The exchange of one job over etcd's keys.

    <prefix>/job_<run id>/inbox/*  messages, in the order of their creation
                          keys/*   everything else that an exchange writes
                          leader   the coordinator's name; ends with its holder's lease
                          state    the coordinator's state

Rules of this file: a long wait is many short ones, so that the end of a server is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from attrs import define, evolve, field

from elasticlib._clock import monotonic
from elasticlib.rendezvous.protocol._exchange import NOTHING, Exchange, Posted
from elasticlib.rendezvous.stores._candidacy import SLICE
from elasticlib.rendezvous.stores._keys import KeyFound, Keys, RenewedKey, component


def key_path(root: str, key: str) -> str:
    """Return the path of an exchange's key."""
    return f"{root}/keys/{component(key)}"


@define(eq=False)
class CompareAndSetExchange(Exchange):
    """One connection; with a *hold*, writing and deleting need it, and *check* is called before."""

    _keys: Keys
    _root: str
    _hold: RenewedKey | None = None
    _check: Callable[[], None] = lambda: None
    _received: int = field(init=False, default=0)
    _found: tuple[str, bytes] | None = field(init=False, default=None)
    """The key and value that the last wait has found, until they are read."""
    _paths: dict[int, str] = field(init=False, factory=dict)

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        self._keys.append(f"{self._root}/inbox", data)
        if values:
            self.write(values)

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        inbox = f"{self._root}/inbox"
        found = self._await(lambda: self._keys.entries(inbox, self._received), inbox, timeout, folder=True)
        for item in found:
            self._received = item.born
            self._paths[item.born] = item.path
        return [Posted(item.born, item.data) for item in found]

    def discard(self, entries: Sequence[Posted]) -> None:
        self._check()
        paths = [self._paths.pop(entry.number) for entry in entries if entry.number in self._paths]
        if paths:
            self._keys.delete(paths, self._hold)

    def write(self, values: Mapping[str, bytes]) -> None:
        self._check()
        self._found = None
        if values:
            self._keys.write({key_path(self._root, key): data for key, data in values.items()}, self._hold)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        paths = [key_path(self._root, key) for key in keys]
        found, self._found = self._found, None
        # A waiting thread reads the key next: one request for both.
        if found is not None and paths == [found[0]]:
            return [found[1]]
        items, _ = self._keys.read(paths)
        return [None if item is None else item.data for item in items]

    def wait(self, key: str, timeout: float | None) -> bool:
        path = key_path(self._root, key)
        self._found = None
        found = self._await(lambda: self._keys.read([path]), path, timeout, folder=False)
        if not found:
            return False
        self._found = (path, found[0].data)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        self._check()
        self._found = None
        if keys:
            self._keys.delete([key_path(self._root, key) for key in keys], self._hold)

    def clear_foreign(self) -> None:
        """Do nothing: workers never share etcd."""

    def clone(self) -> CompareAndSetExchange:
        return evolve(self, keys=self._keys.clone())

    def close(self) -> None:
        self._keys.close()

    def _await(
        self, look: Callable[[], tuple[Sequence[KeyFound | None], int]], path: str, timeout: float | None, folder: bool
    ) -> list[KeyFound]:
        deadline = math.inf if timeout is None else monotonic() + timeout
        while True:
            # Checked before each wait: a change in between is after *version*, and ends the wait.
            items, version = look()
            found = [item for item in items if item is not None]
            left = min(SLICE, deadline - monotonic())
            if found or left <= 0:
                return found
            self._keys.changed(path, version, left, folder)
