"""
Whether a helper, a process of ours that lives, still does its part. Pure.

    runs --stopped alone for WAKE_AFTER--> woken --still stopped at REPLACE_AFTER--> replaced
    runs --silent for REPLACE_AFTER--> replaced

Rules of this file:

* Only time counts in which the launcher was seen to be awake itself (`AwakeTime`): the whole job may have been stopped,
  the machine may have slept, or be so busy that nobody gets a turn.
* A helper that was stopped together with workers was not stopped alone: a scheduler suspends the job, and resumes it.
* A helper that gets the CPU, or waits for it or for a disk, is busy and not silent, however long it owes an answer.
* A helper that a debugger holds is left alone: somebody looks at it.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from attrs import evolve, frozen
from typing_extensions import Self

LOOK = 2.0
"""Seconds between two looks."""
WAKE_AFTER = 5.0
REPLACE_AFTER = 30.0
_LATE = 1.5
"""Seconds by which a look may be late, if this process was awake."""

STOPPED, TRACED, SLEEPS = "T", "t", "S"
"""State letters of the kernel's (``/proc/PID/stat``)."""


class Act(enum.Enum):
    """What must be done about a helper."""

    WAKE = "continue it"
    REPORT_DEBUGGER = "say that a debugger holds it"
    REPLACE = "kill it, so that another one takes its place"


@frozen
class AwakeTime:
    """How long this process was awake between two looks."""

    last: float | None = None

    def look(self, now: float) -> tuple[Self, float | None]:
        """Seconds since the last look; None where there was none, or this process did not run in between."""
        passed = None if self.last is None else now - self.last
        return evolve(self, last=now), None if passed is None or passed > LOOK + _LATE else passed


@frozen
class Look:
    """What is seen of a helper at one moment."""

    state: str
    """Letter of the kernel's state."""
    turns: int = 0
    """How often it has got a CPU."""
    owes: bool = False
    """Whether it has not answered what it was asked."""


Step: TypeAlias = "tuple[Liveness, Act | None]"


@frozen
class Liveness:
    """What is known of one helper."""

    stopped: float = 0.0
    """Seconds for which it was seen stopped alone."""
    held: float = 0.0
    """Seconds for which a debugger was seen to hold it."""
    silent: float = 0.0
    """Seconds for which it slept and did not answer."""
    turns: int = -1
    acted: Act | None = None
    """What was done about it last, since it was well."""

    def step(self, look: Look, passed: float | None, alone: bool) -> Step:
        """
        After a *look*, *passed* seconds after the one before (None: this process was not awake all the time).

        *alone*: no worker is stopped.
        """
        if passed is None:
            return Liveness(turns=look.turns), None
        after = evolve(
            self,
            stopped=self.stopped + passed if look.state == STOPPED and alone else 0.0,
            held=self.held + passed if look.state == TRACED else 0.0,
            silent=self.silent + passed if look.owes and self._slept(look) else 0.0,
            turns=look.turns,
        )
        if not (after.stopped or after.held or after.silent):
            return evolve(after, acted=None), None
        act = after._due()
        return (after, None) if act is self.acted else (evolve(after, acted=act), act)

    def _slept(self, look: Look) -> bool:
        """Whether it waits for something else than a CPU or a disk, and has got no CPU since the last look."""
        return look.state == SLEEPS and look.turns == self.turns

    def _due(self) -> Act | None:
        if max(self.stopped, self.silent) >= REPLACE_AFTER:
            return Act.REPLACE
        if self.stopped >= WAKE_AFTER:
            return Act.WAKE
        if self.held >= WAKE_AFTER:
            return Act.REPORT_DEBUGGER
        return self.acted
