"""
Time in a simulated cluster: one heap of what is to happen, and the processes to which it happens.

Rules of this file: no real time, no thread, no choice. All moments lie on a grid fine enough for a network and
coarse enough that sums of them are exact: so a clock that is ahead by a minute computes the very same durations.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from attrs import Factory, define

GRID = 2.0**20
"""Moments in a second."""
UPTIME = 2.0**17
"""Time on every machine's clock when a job starts; such a clock has never shown less than 0."""


@define(eq=False, repr=False)
class Timeline:
    """Queue of planned actions, in order of time."""

    now: float = 0.0
    steps: int = 0
    """Number of steps that were made."""
    _heap: list[tuple[float, int, Process | None, Callable[[], None]]] = Factory(list)
    _serial: int = 0

    def at(self, when: float, owner: Process | None, do: Callable[[], None]) -> None:
        """Do it at *when*: never if *owner* is dead by then or *when* is infinite, later if it is frozen."""
        if when == math.inf:
            return
        self._serial += 1
        moment = max(self.now, math.ceil(when * GRID) / GRID)
        heapq.heappush(self._heap, (moment, self._serial, owner, do))

    def after(self, delay: float, owner: Process | None, do: Callable[[], None]) -> None:
        """Do it *delay* seconds from now."""
        self.at(self.now + delay, owner, do)

    def next_at(self) -> float | None:
        """When something is to happen next; None: never."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Let the next thing happen."""
        when, serial, owner, do = heapq.heappop(self._heap)
        self.now, self.steps = when, self.steps + 1
        if owner is not None:
            if not owner.alive:
                return
            if owner.thaws_at > when:
                # The serial keeps what waited in its order.
                heapq.heappush(self._heap, (owner.thaws_at, serial, owner, do))
                return
        do()


@define(eq=False, repr=False)
class Process:
    """Something that can be frozen and killed; with a clock of its own."""

    name: str
    timeline: Timeline
    skew: float = 0.0
    drift: float = 0.0
    alive: bool = True
    thaws_at: float = 0.0
    """Until then it does nothing; what happens to it meanwhile waits."""
    missed: float = 0.0
    """Seconds for which its clock stood still."""

    @property
    def frozen(self) -> bool:
        """Return whether the process is frozen now."""
        return self.thaws_at > self.timeline.now

    def freeze(self, until: float) -> None:
        """It stands still until then at least."""
        self.thaws_at = max(self.thaws_at, until)

    def clock(self) -> float:
        """Return the time that the clock of the process shows."""
        return UPTIME + (self.timeline.now - self.missed) * (1.0 + self.drift) + self.skew

    def moment(self, shown: float) -> float:
        """When its clock shows that."""
        since = shown - UPTIME - self.skew
        # With a drift the sum is not exact: better a moment late than for ever just before.
        return self.missed + (since / (1.0 + self.drift) + 2.0 / GRID if self.drift else since)

    def at(self, shown: float, do: Callable[[], None]) -> None:
        """Do it when its clock shows that."""
        self.timeline.at(self.moment(shown), self, do)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do it after so many seconds of its clock."""
        self.at(self.clock() + seconds, do)
