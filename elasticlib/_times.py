"""Times that may not be there, or not for good. Pure."""

from __future__ import annotations

from typing import Protocol


class Term(Protocol):
    """A time that goes on for as long as somebody renews it; processes may share it, by its descriptor."""

    def ends_at(self) -> float:
        """Monotonic seconds; infinite while nothing ends it."""

    def fileno(self) -> int:
        """What another process gets."""


def soonest(*times: float | None) -> float | None:
    """The first of several times, or the shortest of several waits; None where there is none."""
    return min((each for each in times if each is not None), default=None)
