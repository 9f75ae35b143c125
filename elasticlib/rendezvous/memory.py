"""
An exchange for the threads of one program.

Rules of this file: one lock, held for a few instructions only; a waiter sleeps on an event of its own,
so that a write wakes exactly those who wait for that key.
"""

from __future__ import annotations

import threading

from attrs import Factory, define


@define(eq=False)
class MemoryExchange:
    """Counters and values in dicts; the contract is that of `Exchange`."""

    _lock: threading.Lock = Factory(threading.Lock)
    _counters: dict[str, int] = Factory(dict)
    _values: dict[str, bytes] = Factory(dict)
    _waiters: dict[str, list[threading.Event]] = Factory(dict)

    def add(self, key: str, n: int) -> int:
        """Add *n* to a counter that starts at 0 and return the sum."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + n
            return self._counters[key]

    def set(self, key: str, value: bytes) -> None:
        """Write the value, wake all who wait for it."""
        with self._lock:
            self._values[key] = value
            woken = self._waiters.pop(key, [])
        for event in woken:
            event.set()

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        with self._lock:
            return self._values.get(key)

    def wait(self, key: str, timeout: float | None) -> bool:
        """Block until the key is there; whether it was within *timeout* seconds."""
        with self._lock:
            if key in self._values:
                return True
            event = threading.Event()
            self._waiters.setdefault(key, []).append(event)
        if event.wait(timeout):
            return True
        with self._lock:
            waiters = self._waiters.get(key, [])
            if event not in waiters:  # set while we gave up
                return True
            waiters.remove(event)
            if not waiters:
                del self._waiters[key]
            return False

    def delete(self, key: str) -> None:
        """Forget the key."""
        with self._lock:
            self._values.pop(key, None)
