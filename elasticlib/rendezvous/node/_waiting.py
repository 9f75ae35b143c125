"""
When people are told that a node still waits for its ranks, and for what. Pure.

Rules of this file: the times are data; what is said is made by whoever knows it.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

_TELL_AFTER = (5.0, 15.0, 30.0)
"""Seconds of waiting after which it is told."""
_TELL_EVERY = 60.0
"""Seconds between two tellings afterwards."""


def search(where: str, host: str, status: str) -> str:
    """Where a job is, as far as is known: the store's place, who coordinates, what else was heard."""
    status = f"coordinated by node {host}" if host else status
    return f" ({'; '.join(filter(None, (where, status)))})" if where or status else ""


@frozen
class Waiting:
    """Since when a node has waited, and how often that was told."""

    since: float
    told: int = 0

    def due_at(self) -> float:
        """When it is to be told next."""
        more = self.told - len(_TELL_AFTER)
        return self.since + (_TELL_AFTER[self.told] if more < 0 else _TELL_AFTER[-1] + _TELL_EVERY * (more + 1))

    def complain(self, node: str, job: str, why: str, now: float) -> tuple[Self, str]:
        """Tell it once more, and how: *why* may be empty."""
        why = why or "the job is found, but its coordinator has not reported its nodes yet"
        said = f"node {node} has waited {now - self.since:.0f} s for job {job!r}: {why}"
        return evolve(self, told=self.told + 1), said
