"""Times that may not be there. Pure."""

from __future__ import annotations


def soonest(*times: float | None) -> float | None:
    """The first of several times, or the shortest of several waits; None where there is none."""
    return min((each for each in times if each is not None), default=None)
