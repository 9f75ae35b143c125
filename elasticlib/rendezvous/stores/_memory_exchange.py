"""
An exchange for the threads of one program: the simplest store that carries a job.

Rules of this file: one lock, held for a few instructions only. A waiting thread looks again after
each write.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from attrs import Factory, define, field

from elasticlib.rendezvous.protocol._exchange import NOTHING, Exchange, Posted


@define(eq=False)
class _Shelf:
    """The data that all connections share."""

    changed: threading.Condition = Factory(threading.Condition)
    """Its lock guards all fields."""
    values: dict[str, bytes] = Factory(dict)
    inbox: dict[int, bytes] = Factory(dict)
    posted: int = 0


@define(eq=False)
class MemoryExchange(Exchange):
    """Values in a dict."""

    _shelf: _Shelf = Factory(_Shelf)
    _received: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        shelf = self._shelf
        with shelf.changed:
            shelf.values.update(values)
            shelf.posted += 1
            shelf.inbox[shelf.posted] = data
            shelf.changed.notify_all()

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        shelf = self._shelf
        with shelf.changed:
            # Entries may be discarded meanwhile: new ones are counted by number, not by entry.
            shelf.changed.wait_for(lambda: shelf.posted > self._received, timeout)
            new = [Posted(number, data) for number, data in shelf.inbox.items() if number > self._received]
            self._received = shelf.posted
            return new

    def discard(self, entries: Sequence[Posted]) -> None:
        with self._shelf.changed:
            for entry in entries:
                self._shelf.inbox.pop(entry.number, None)

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._shelf.changed:
            self._shelf.values.update(values)
            self._shelf.changed.notify_all()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._shelf.changed:
            return [self._shelf.values.get(key) for key in keys]

    def wait(self, key: str, timeout: float | None) -> bool:
        shelf = self._shelf
        with shelf.changed:
            shelf.changed.wait_for(lambda: key in shelf.values or self._closed, timeout)
            return key in shelf.values

    def delete(self, keys: Sequence[str]) -> None:
        with self._shelf.changed:
            for key in keys:
                self._shelf.values.pop(key, None)

    def clear_foreign(self) -> None:
        """Do nothing: no worker reaches this memory."""

    def clone(self) -> MemoryExchange:
        return MemoryExchange(self._shelf)

    def close(self) -> None:
        """End a running wait."""
        with self._shelf.changed:
            self._closed = True
            self._shelf.changed.notify_all()
