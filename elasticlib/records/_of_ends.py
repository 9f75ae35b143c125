"""
What people should know of the ends of workers.

Rules of this file: a record holds facts; its text is made from them, here.
"""

from __future__ import annotations

import logging

from attrs import frozen

from elasticlib._wording import duration
from elasticlib.errors import name_of_signal
from elasticlib.records._sinks import Record


@frozen
class WorkerLingers(Record, level=logging.WARNING):
    """A worker's program is over, but its process has not ended in the time that it has for this."""

    local_rank: int
    pid: int
    seconds: float
    ends: bool
    """Whether it is stopped for that."""
    stacks: str
    """Those of its threads, as the fault handler writes them."""

    def __str__(self) -> str:
        what = (
            "it is stopped" if self.ends else "it is left running, since its program succeeded (exit_timeout stops it)"
        )
        return (
            f"local rank {self.local_rank} (process {self.pid}) has finished, but still runs {self.seconds:g} s later: "
            f"threads, exit handlers or finalizers do not end, and {what}; its threads:\n{self.stacks or '(not seen)'}"
        )


@frozen
class LastRuns(Record, level=logging.WARNING):
    """One worker runs on, though all others of its node have finished with success."""

    rank: int
    pid: int
    seconds: float
    """Since the others have finished."""
    left: float | None
    """Seconds until it is stopped, as its function has returned; None: it is not."""
    place: str
    """Where it is, such as ``at train.py:41``; empty where that could not be seen."""
    are_all: bool
    """Whether the job has no ranks on other nodes."""

    def __str__(self) -> str:
        others = f"all ranks but {self.rank}" if self.are_all else f"all ranks of this node but {self.rank}"
        end = "it is left running" if self.left is None else f"exit_timeout ends it in {self.left:g} s"
        where = f"is {self.place}" if self.place else "still runs"
        return f"{others} finished {duration(self.seconds)} ago; rank {self.rank} (process {self.pid}) {where}: {end}"


@frozen
class WorkerCrashedLate(Record, level=logging.WARNING):
    """A worker's process crashed after its program had ended: that counts, with its result."""

    local_rank: int
    pid: int
    exitcode: int
    """Of the program."""
    late: int
    """How the process ended: an exit status, or ``-n`` for signal ``n``."""

    def __str__(self) -> str:
        end = f"with exit status {self.late}" if self.late >= 0 else f"by {name_of_signal(-self.late)}"
        return (
            f"the process {self.pid} of local rank {self.local_rank} ended {end} while its last objects were "
            f"finalized; its program had ended before, with exit status {self.exitcode}, and that counts"
        )
