"""Times that may be absent, or that may be extended. Pure."""

from __future__ import annotations

from typing import Protocol


class Term(Protocol):
    """A deadline that lasts while another process renews it. Processes share it by its descriptor."""

    def ends_at(self) -> float:
        """Return its end in monotonic seconds; infinite while nothing ends it."""

    def fileno(self) -> int:
        """Return the descriptor for another process."""


def soonest(*times: float | None) -> float | None:
    """Return the earliest of several times, or the shortest of several waits; None if all are None."""
    return min((each for each in times if each is not None), default=None)
