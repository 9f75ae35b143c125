"""
An exchange for the threads of one program.

Rules of this file: one lock, held for a few instructions only; a waiter sleeps on an event of its own,
so that a write wakes exactly those who wait for that key.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from attrs import Factory, define, field

from elasticlib.rendezvous.protocol._exchange import Posted


@define(eq=False)
class _Shelf:
    """What all connections share."""

    lock: threading.Lock = Factory(threading.Lock)
    values: dict[str, bytes] = Factory(dict)
    waiters: dict[str, list[threading.Event]] = Factory(dict)
    inbox: dict[int, bytes] = Factory(dict)
    posted: int = 0
    grown: threading.Condition = field(init=False)

    @grown.default
    def _on_the_lock(self) -> threading.Condition:
        return threading.Condition(self.lock)


@define(eq=False)
class MemoryExchange:
    """Values in a dict; the contract is that of `Exchange`."""

    _shelf: _Shelf = Factory(_Shelf)
    _received: int = field(default=0, init=False)
    _waits: threading.Event | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def post(self, data: bytes) -> None:
        """Append an entry to the inbox."""
        shelf = self._shelf
        with shelf.lock:
            shelf.posted += 1
            shelf.inbox[shelf.posted] = data
            shelf.grown.notify_all()

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        """Entries that this connection has not received yet."""
        shelf = self._shelf
        with shelf.lock:
            shelf.grown.wait_for(lambda: shelf.posted > self._received, timeout)
            new = [Posted(number, data) for number, data in shelf.inbox.items() if number > self._received]
            self._received = shelf.posted
            return new

    def discard(self, entries: Sequence[Posted]) -> None:
        """Forget entries that were received."""
        with self._shelf.lock:
            for entry in entries:
                self._shelf.inbox.pop(entry.number, None)

    def write(self, values: Mapping[str, bytes]) -> None:
        """Write all values, wake all who wait for their keys."""
        shelf = self._shelf
        with shelf.lock:
            shelf.values.update(values)
            woken = [event for key in values for event in shelf.waiters.pop(key, [])]
        for event in woken:
            event.set()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, or None."""
        with self._shelf.lock:
            return [self._shelf.values.get(key) for key in keys]

    def wait(self, key: str, timeout: float | None) -> bool:
        """Block until the key is there; whether it was within *timeout* seconds."""
        shelf = self._shelf
        with shelf.lock:
            if key in shelf.values:
                return True
            if self._closed:
                return False
            event = self._waits = threading.Event()
            shelf.waiters.setdefault(key, []).append(event)
        event.wait(timeout)
        with shelf.lock:
            self._waits = None
            waiters = shelf.waiters.get(key, [])
            if event not in waiters:  # set, perhaps while we gave up
                return True
            waiters.remove(event)
            if not waiters:
                del shelf.waiters[key]
            return False

    def delete(self, keys: Sequence[str]) -> None:
        """Forget the keys."""
        with self._shelf.lock:
            for key in keys:
                self._shelf.values.pop(key, None)

    def clear_foreign(self) -> None:
        """Nothing: no worker reaches this memory."""

    def clone(self) -> MemoryExchange:
        """Another connection to the same memory."""
        return MemoryExchange(self._shelf)

    def close(self) -> None:
        """End a wait that is under way."""
        with self._shelf.lock:
            self._closed = True
            if self._waits is not None:
                self._waits.set()
