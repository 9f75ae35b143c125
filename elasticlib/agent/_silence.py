"""
For how long workers have written nothing, which is why a person mostly interrupts a job.

Rules of this file: pure but for one look at when files were written to. The kernel keeps that of terminals, pipes and
files alike, so that nothing has to be read or counted while the job runs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

LONG = 20.0
"""Seconds without a word after which whoever interrupts the job wants to see where it is."""
_OF_TERMINALS = 8.0
"""Seconds that the time of a terminal is behind at most: the kernel writes it down no more often."""


def seconds_of(now: float, began: float, files: Iterable[int | str]) -> float:
    """Seconds at the Unix time *now* since any of *files*, descriptors or paths, was written to, or since *began*."""
    return max(0.0, now - max([began, *(_written(file) for file in files)]))


def _written(file: int | str) -> float:
    """Return the Unix time at which *file* was last written to, or a later one; 0 where it is closed or gone."""
    try:
        status = os.stat(file)
    except OSError:
        return 0.0
    return status.st_mtime + (_OF_TERMINALS if stat.S_ISCHR(status.st_mode) else 0.0)
