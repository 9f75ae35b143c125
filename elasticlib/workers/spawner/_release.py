"""
What functions that have returned wait for, until those of all local ranks have: a pipe, written to once a round.

Rules of this file: it is a byte that releases, not an end that is closed, since other processes may hold copies of it.
"""

from __future__ import annotations

import os

from elasticlib.workers.child import _report


class Release:
    """The pipe of one round after the other."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = ()

    def begin_round(self) -> None:
        """Hold what returns from here on. Raises OSError where no descriptor is free."""
        self.close()
        self._ends = os.pipe2(os.O_CLOEXEC)

    def for_workers(self) -> tuple[int, tuple[int, int]]:
        """Return the end that workers wait at, and its identity."""
        reading, _ = self._ends
        return reading, _report.identity(reading)

    def give(self) -> None:
        """Let all go that wait now, or will."""
        for writing in self._ends[1:]:
            os.write(writing, b".")

    def own(self) -> tuple[int, ...]:
        """Return the descriptors that workers need not hold."""
        return self._ends[1:]

    def close(self) -> None:
        """Let go of the descriptors."""
        for each in self._ends:
            os.close(each)
        self._ends = ()
