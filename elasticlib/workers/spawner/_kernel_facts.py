"""
What the kernel says about a worker and what it started, read from ``/proc``.

Rules of this file: nothing is signalled here; a process that is gone, or that may not be looked at, has no facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from elasticlib.workers import _reaper


def catches(pid: int, signum: int) -> bool:
    """True if the program has a handler for *signum*."""
    return _has_signal(pid, b"SigCgt:", signum)


def _has_signal(pid: int, mask: bytes, signum: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            value = next((line.split()[1] for line in file if line.startswith(mask)), b"0")
    except OSError:
        return False
    return bool(int(value, 16) >> (signum - 1) & 1)


def group(leader: int) -> Iterator[int]:
    """The processes of the group that *leader* began, the leader among them; zombies are left out."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (facts := _reaper.status(int(entry))) is not None:
            if int(facts[2]) == leader and facts[0] not in (b"Z", b"X"):
                yield int(entry)
