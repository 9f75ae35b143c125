"""
The sidecar's watch of its launcher, and of the time that this node's workers have. Pure.

A launcher that sends nothing for a while stands still: the node's heartbeats pause, so that it
counts as lost. Workers may run from the time at which ranks were passed on until their end is
reported. They may run no longer than the contact allows.

Rules of this file: times are this machine's monotonic seconds. The time at which workers must be
dead is an argument. Once it has come, the process with which they die is killed, until they are
known to be gone.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib._times import soonest

SILENCE = 0.15
"""
Share of the heartbeat time: a launcher that is silent for longer stands still, unless it has
another limit.
"""
_ANSWER = 0.15
"""Share of the heartbeat time between two answers to the launcher's signs of life."""


@frozen
class SidecarWatch:
    """State of the watch."""

    heartbeat: float
    last_message_at: float
    """Time of the launcher's last sign of life."""
    answered: float
    stall: float = SILENCE
    """
    Share of the heartbeat time: if a launcher is silent for longer, its node's heartbeats pause.
    """
    generation: int = 0
    """Number of the launcher's request that the notices answer."""
    paused: bool = False
    """True while the heartbeats are paused."""
    running: bool = False
    """True if workers may run."""
    due: bool = False
    """True if they must be dead."""

    def after_message(self, now: float) -> Self:
        """Note a message of the launcher."""
        return evolve(self, last_message_at=now)

    def answer(self, now: float) -> tuple[Self, bool]:
        """Note the launcher's sign of life; return whether it is time to send one back."""
        # Answering each sign of life would only fill the channel of a launcher that is slow to read.
        is_due = self.heartbeat > 0 and now >= self.answered + _ANSWER * self.heartbeat
        if not is_due:
            return self, False
        return evolve(self, answered=now), True

    def joins(self, generation: int) -> Self:
        """Note that the launcher asks for ranks: no worker runs."""
        return evolve(self, generation=generation, running=False, due=False)

    def assigned(self) -> Self:
        """Note that ranks were passed on."""
        return evolve(self, running=True, due=False)

    def gone(self) -> Self:
        """Note that no worker runs any more."""
        return evolve(self, running=False, due=False)

    def judge(self, now: float, kill_at: float | None) -> Self:
        """
        Judge by the time; *kill_at* is when running workers must be dead, or None without a limit.
        """
        has_heartbeats = self.heartbeat > 0
        is_silent = has_heartbeats and now >= self._silent_at
        is_late = self.running and kill_at is not None and now >= kill_at
        # Once due, always due: only new ranks, or the workers' end, revoke that.
        return evolve(self, paused=is_silent, due=self.due or is_late)

    @property
    def _silent_at(self) -> float:
        """Time at which a silent launcher counts as standing still."""
        return self.last_message_at + self.stall * self.heartbeat

    def lease_end(self, kill_at: float | None) -> float | None:
        """
        Return the time until which workers may run (infinite: no limit); None: unchanged, as they
        should be dead.
        """
        if self.due:
            return None
        # Without workers, or without heartbeats that others count, nothing limits their time.
        if not self.running or kill_at is None:
            return math.inf
        return kill_at

    def wake_at(self, kill_at: float | None) -> float | None:
        """Return the time at which `judge` must be called, if nothing happens before."""
        silent_at = None
        if self.heartbeat and not self.paused:
            silent_at = self._silent_at
        # Workers that are due are killed at once, and again whenever something happens.
        may_be_late = self.running and not self.due
        if not may_be_late:
            kill_at = None
        return soonest(silent_at, kill_at)
