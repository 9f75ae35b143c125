"""
Which GPUs the tests of one process have, where pytest-xdist runs several processes beside each other. PURE.

Rules of this file: processes at once never use the same GPU. Where there are enough for all, each has its own; else
they take turns with all of them, a test at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen


@frozen
class ProcessShare:
    """What one of several processes has."""

    gpus: tuple[int, ...]
    """Indices among those that the machine shows."""
    takes_turns: bool
    """Whether others have the same ones, so that each test waits for its turn."""


def share(gpus: int, nproc: int, process: int = 0, processes: int = 1) -> ProcessShare:
    """The share of this *process* of *processes* in so many *gpus*, for a test of *nproc* ranks with one GPU each."""
    each = gpus // processes
    if processes == 1 or each < nproc:
        return ProcessShare(tuple(range(gpus)), processes > 1)
    return ProcessShare(tuple(range(process * each, (process + 1) * each)), False)


def place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Number of this process and of all, as pytest-xdist tells; (0, 1) without it."""
    worker = re.fullmatch(r"gw(\d+)", environment.get("PYTEST_XDIST_WORKER", ""))
    count = environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    if worker is None or not count.isdecimal() or int(worker[1]) >= int(count):
        return 0, 1
    return int(worker[1]), int(count)
