"""
The simulated network: the links of machines, and the ways between them.

Rules of this file: what is sent one way arrives in its order and each after a delay; what is on its way when a link
is cut arrives after the link is back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import Factory, define

from tests.sim.simulator.timeline import Process, Timeline

if TYPE_CHECKING:
    from tests.sim.simulator.store import Connection


@define(eq=False, repr=False)
class Link:
    """Link between one machine and the network."""

    number: int
    alive: bool = True
    cut_until: float = 0.0
    slow_until: float = 0.0
    delay: float = 0.0
    connections: list[Connection] = Factory(list)
    """Connections that end at this machine."""


@define(eq=False, repr=False)
class Network:
    """Delays, drawn from the cluster's seed."""

    timeline: Timeline
    chance: random.Random
    fastest: float = 0.0001
    slowest: float = 0.002

    def delay(self, *links: Link) -> float:
        """Seconds that a message takes."""
        if len(links) == 1:
            return self.fastest
        slow = sum(link.delay for link in links if self.timeline.now < link.slow_until)
        return self.fastest + (self.slowest - self.fastest) * self.chance.random() + slow


@define(eq=False, repr=False)
class Way:
    """One direction of a connection."""

    network: Network
    links: tuple[Link, ...]
    last: float = 0.0
    queue: deque[tuple[Process | None, Callable[[], None]]] = Factory(deque)

    def send(self, to: Process | None, do: Callable[[], None]) -> None:
        """Do it there; None: in the kernel of the machine, which is never frozen."""
        self.queue.append((to, do))
        self.last = max(self.last, self.network.timeline.now + self.network.delay(*self.links))
        self.network.timeline.at(self.last, None, self._arrives)

    def _arrives(self) -> None:
        if not self.queue or not all(link.alive for link in self.links):
            self.queue.clear()
            return
        timeline = self.network.timeline
        opens = max(link.cut_until for link in self.links) if len(self.links) > 1 else 0.0
        if opens > timeline.now:
            # The kernel tries again at growing intervals.
            timeline.at(opens + self.network.chance.random(), None, self._arrives)
            return
        to, do = self.queue.popleft()
        timeline.at(timeline.now, to, do)
