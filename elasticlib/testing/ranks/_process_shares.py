"""
The GPUs of each process when pytest-xdist runs tests in several processes. PURE.

Rules of this file: two processes never use the same GPU at the same time. If there are enough GPUs,
each process has its own. Otherwise the processes take turns, one test at a time, with all GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen


@frozen
class ProcessShare:
    """GPUs of one of several processes."""

    gpus: tuple[int, ...]
    """Indices among the visible GPUs of the machine."""
    takes_turns: bool
    """True if other processes have the same GPUs, so that each test waits for its turn."""


def share(gpus: int, nproc: int, process: int = 0, processes: int = 1) -> ProcessShare:
    """
    Return the share of process number *process* (of *processes*) in *gpus* GPUs.

    The test has *nproc* ranks with one GPU each.
    """
    each = gpus // processes
    if processes == 1 or each < nproc:
        return ProcessShare(tuple(range(gpus)), processes > 1)
    return ProcessShare(tuple(range(process * each, (process + 1) * each)), False)


def place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return pytest-xdist's index of this process and its number of processes; else (0, 1)."""
    worker = re.fullmatch(r"gw(\d+)", environment.get("PYTEST_XDIST_WORKER", ""))
    count = environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    if worker is None or not count.isdecimal() or int(worker[1]) >= int(count):
        return 0, 1
    return int(worker[1]), int(count)
