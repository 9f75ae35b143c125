"""
What the sidecar watches besides the job: its launcher, and the time that this node's workers have. Pure.

A launcher that says nothing for a while stands still: the node's heartbeats rest, so that it counts as lost.
Workers may run from when ranks were passed on until something is heard of their end, and no longer than the contact
allows.

Rules of this file: times are this machine's monotonic seconds. When workers must be dead is data that is passed in;
once that has come, whoever is named as the process with which they die is killed, until they are known to be gone.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib._times import soonest

SILENCE = 0.15
"""Share of the heartbeat time: a launcher that is silent for so long stands still, unless it says otherwise."""
_ANSWER = 0.15
"""Share of the heartbeat time between two answers to the launcher's signs of life."""


@frozen
class SidecarWatch:
    """What is known, and what follows from it."""

    heartbeat: float
    heard: float
    """When the launcher gave its last sign of life."""
    answered: float
    stall: float = SILENCE
    """Share of the heartbeat time: the heartbeats of a node whose launcher is silent for longer rest."""
    generation: int = 0
    """Which request of the launcher's the notices answer."""
    held: bool = False
    """Whether the heartbeats rest."""
    running: bool = False
    """Whether workers may run."""
    due: bool = False
    """Whether they must be dead."""

    def said(self, now: float) -> Self:
        """The launcher said something."""
        return evolve(self, heard=now)

    def answer(self, now: float) -> tuple[Self, bool]:
        """The launcher says that it lives: whether it is time to say the same."""
        if self.heartbeat and now >= self.answered + _ANSWER * self.heartbeat:
            return evolve(self, answered=now), True
        return self, False

    def joins(self, generation: int) -> Self:
        """The launcher asks for ranks: no worker runs."""
        return evolve(self, generation=generation, running=False, due=False)

    def assigned(self) -> Self:
        """Ranks are passed on."""
        return evolve(self, running=True, due=False)

    def gone(self) -> Self:
        """No worker runs any more."""
        return evolve(self, running=False, due=False)

    def judge(self, now: float, kill_at: float | None) -> Self:
        """Time has passed; *kill_at* is when workers that still run must be dead, if that can be foreseen."""
        held = bool(self.heartbeat) and now >= self.heard + self.stall * self.heartbeat
        late = self.running and kill_at is not None and now >= kill_at
        return evolve(self, held=held, due=self.due or late)

    def lease_end(self, kill_at: float | None) -> float | None:
        """Until when workers may run (infinite: nothing limits it); None once they should be dead: as it was."""
        if self.due:
            return None
        return kill_at if self.running and kill_at is not None else math.inf

    def wake_at(self, kill_at: float | None) -> float | None:
        """When `judge` is wanted, if nothing happens before."""
        silent = self.heard + self.stall * self.heartbeat if self.heartbeat and not self.held else None
        return soonest(silent, kill_at if self.running and not self.due else None)
