"""
An inbox made of a counter and numbered entries, for stores that know no queues.

A poster takes the next number from the counter, then writes the entry under it. Rules of this file: a number
without an entry is a poster on its way, paused, or dead; it holds up nobody else's entries. A poster's own entries stay
in order, since it takes a number only after its last entry was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import Factory, define, field

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import Posted

LATE = 60.0
"""Seconds that a number without an entry is looked after; a poster that took longer must not rely on its entry."""
SHORTEST, LONGEST = 0.01, 1.0
"""Bounds, in seconds, of the pause between two looks at missing entries."""
MOST = 100_000
"""Numbers that may be new at once: more were not given out by posters."""


@define
class CountedInbox:
    """The receiving side."""

    _count: Callable[[], int]
    """The counter."""
    _fetch: Callable[[Sequence[int]], list[bytes | None]]
    """The entries of these numbers."""
    _wait: Callable[[int, float | None], bool]
    """Blocks until the entry of this number is there, at most so many seconds (None: for ever)."""
    _clock: Clock = field(default=monotonic, kw_only=True)
    _next: int = field(default=1, kw_only=True)
    _missing: dict[int, float] = field(default=Factory(dict), init=False)
    """Numbers below `_next` whose entries were not there, and since when."""

    def receive(self, timeout: float | None) -> list[Posted]:
        """Entries not received yet, oldest first; blocks for at most *timeout* seconds until there is one."""
        deadline = None if timeout is None else self._clock() + timeout
        while True:
            entries = self._gather()
            left = None if deadline is None else deadline - self._clock()
            if entries or (left is not None and left <= 0):
                return entries
            self._wait(self._next, self._pause(left))

    def _gather(self) -> list[Posted]:
        count = self._count()
        if not self._next - 1 <= count < self._next + MOST or len(self._missing) > MOST:
            raise RendezvousStateError(f"the inbox counter was overwritten: it holds {count} after {self._next - 1}")
        numbers = [*self._missing, *range(self._next, count + 1)]
        self._next = count + 1
        now = self._clock()
        entries = []
        for number, data in zip(numbers, self._fetch(numbers) if numbers else [], strict=True):
            if data is not None:
                self._missing.pop(number, None)
                entries.append(Posted(number, data))
            elif now - self._missing.setdefault(number, now) > LATE:
                del self._missing[number]
        return entries

    def _pause(self, left: float | None) -> float | None:
        if not self._missing:
            return left
        age = self._clock() - max(self._missing.values())
        pause = min(max(age, SHORTEST), LONGEST)
        return pause if left is None else min(pause, left)
