"""
Signals that announce the end of this node, and the time that they leave. Pure.

Rules of this file: Unix times are arguments. A scheduler announces an end some time before it.
"""

from __future__ import annotations

import math

from attrs import define

_LONGEST = 3600.0
"""Seconds; a person, and no scheduler, sends the signal earlier than this before the end of the job."""


@define
class EndNotice:
    """The notices that a node gets of its own end; a watch of the scheduler may change the time."""

    signals: frozenset[int] = frozenset()
    """Signals that announce it."""
    end_time: float = math.inf
    """Unix time of the end; inf if unknown."""

    def grace(self, now: float, least: float) -> float | None:
        """Return the seconds that a signal at *now* leaves if they are more than *least*; None for *least*."""
        left = self.end_time - now
        return left if least < left <= _LONGEST else None
