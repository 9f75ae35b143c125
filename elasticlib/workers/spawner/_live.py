"""What a spawner knows of one worker."""

from __future__ import annotations

from dataclasses import dataclass

from elasticlib import processes
from elasticlib.workers.child import _exiting


@dataclass
class Live:
    """A worker that was not reaped yet."""

    round: int
    local_rank: int
    pid: int
    handle: processes.Handle
    left: tuple[int, int, int]
    """What it leaves behind, as descriptors: report, fault handler's stacks, last lines of stderr."""
    course: _exiting.Course
    signals_group: bool = False
    """Whether a signal is for its whole group at once: it is no Python program."""
    told: bool = False
    """Whether it was sent the stop signal while it lived."""
    dumped: int = -1
    """Bytes of its threads' stacks at the last look."""
