"""
The decision whether a helper, a process of elasticlib that lives, still works. Pure.

    runs --stopped alone for WAKE_AFTER--> woken --still stopped at REPLACE_AFTER--> replaced
    runs --silent for REPLACE_AFTER--> replaced

Rules of this file:

* Only time counts in which the launcher itself was awake (`AwakeTime`). The whole job may have
  been stopped, the machine may have slept, or be so busy that no process runs.
* A helper that was stopped together with workers was not stopped alone: a scheduler suspends the
  job, and resumes it.
* A helper that gets the CPU, or waits for it or for a disk, is busy and not silent, however long
  its answer takes.
* A helper that a debugger holds is left alone: its user is at work.
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
"""State letters of the kernel (``/proc/PID/stat``)."""


class HelperAction(enum.Enum):
    """Action that a helper needs."""

    WAKE = "continue it"
    REPORT_DEBUGGER = "say that a debugger holds it"
    REPLACE = "kill it, so that another one takes its place"


@frozen
class AwakeTime:
    """Clock for the time that this process was awake between two looks."""

    last: float | None = None

    def look(self, now: float) -> tuple[Self, float | None]:
        """
        Return the seconds since the last look; None for the first look, or if this process did
        not run meanwhile.
        """
        after = evolve(self, last=now)
        if self.last is None:
            return after, None
        passed = now - self.last
        was_awake = passed <= LOOK + _LATE
        return after, passed if was_awake else None


@frozen
class HelperLook:
    """State of a helper at one moment."""

    state: str
    """Letter of the kernel's state."""
    turns: int = 0
    """Number of times that it has got a CPU."""
    owes: bool = False
    """True if a question to it has no answer yet."""


Step: TypeAlias = "tuple[Liveness, HelperAction | None]"


@frozen
class Liveness:
    """Record of one helper: how long it stands still, and the last action."""

    stopped: float = 0.0
    """Seconds for which it was seen stopped alone."""
    traced: float = 0.0
    """Seconds for which a debugger was seen to hold it."""
    silent: float = 0.0
    """Seconds for which it slept and did not answer."""
    turns: int = -1
    acted: HelperAction | None = None
    """Last action since the helper was well."""

    def step(self, look: HelperLook, passed: float | None, alone: bool) -> Step:
        """
        Return the new record after a *look*, and the action that is due.

        *passed*: seconds since the look before (None: this process was not awake all the time).
        *alone*: no worker is stopped.
        """
        # Time in which this process itself was not awake counts for no helper.
        if passed is None:
            return Liveness(turns=look.turns), None

        is_stopped = look.state == STOPPED and alone
        is_traced = look.state == TRACED
        is_silent = look.owes and self._slept(look)
        after = evolve(
            self,
            stopped=_seconds(is_stopped, self.stopped, passed),
            traced=_seconds(is_traced, self.traced, passed),
            silent=_seconds(is_silent, self.silent, passed),
            turns=look.turns,
        )
        if not (after.stopped or after.traced or after.silent):
            # It is well again, so that another stop is acted upon again.
            return evolve(after, acted=None), None

        return after._act()

    def _act(self) -> Step:
        """Return the action that is due, unless it was taken already."""
        act = self._due()
        if act is self.acted:
            return self, None
        return evolve(self, acted=act), act

    def _slept(self, look: HelperLook) -> bool:
        """
        Return True if it waits for something other than a CPU or a disk, and got no CPU since the
        last look.
        """
        return look.state == SLEEPS and look.turns == self.turns

    def _due(self) -> HelperAction | None:
        if max(self.stopped, self.silent) >= REPLACE_AFTER:
            return HelperAction.REPLACE
        if self.stopped >= WAKE_AFTER:
            return HelperAction.WAKE
        if self.traced >= WAKE_AFTER:
            return HelperAction.REPORT_DEBUGGER
        return self.acted


def _seconds(is_so: bool, before: float, passed: float) -> float:
    """
    Return for how many seconds something is so, which was so for *before* seconds at the last
    look.
    """
    return before + passed if is_so else 0.0
