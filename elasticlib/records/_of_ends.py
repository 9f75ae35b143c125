"""
Records about the ends of workers for the job's user.

Rules of this file: a record has facts, and its class makes the text from them.
"""

from __future__ import annotations

import logging

from attrs import frozen

from elasticlib._wording import duration
from elasticlib.errors import name_of_signal
from elasticlib.records._sinks import Record


@frozen
class WorkerLingers(Record, level=logging.WARNING):
    """Worker whose program has ended, but whose process has not exited in time."""

    local_rank: int
    pid: int
    seconds: float
    ends: bool
    """True if it is stopped for that."""
    stacks: str
    """Stacks of its threads, in the format of the fault handler."""

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
    """Last running worker of a node, whose others have all succeeded."""

    rank: int
    pid: int
    seconds: float
    """Seconds since the others have finished."""
    left: float | None
    """Seconds until it is stopped, because its function has returned; None: it is not stopped."""
    place: str
    """Place of the worker, such as ``at train.py:41``; empty if unknown."""
    are_all: bool
    """True if the job has no ranks on other nodes."""

    def __str__(self) -> str:
        others = f"all ranks but {self.rank}" if self.are_all else f"all ranks of this node but {self.rank}"
        end = "it is left running" if self.left is None else f"exit_timeout ends it in {self.left:g} s"
        where = f"is {self.place}" if self.place else "still runs"
        return f"{others} finished {duration(self.seconds)} ago; rank {self.rank} (process {self.pid}) {where}: {end}"


@frozen
class WorkerCrashedLate(Record, level=logging.WARNING):
    """Crash of a worker's process after its program had ended: the program's end counts."""

    local_rank: int
    pid: int
    exitcode: int
    """Exit status of the program."""
    late: int
    """Exit status of the process, or ``-n`` for signal ``n``."""

    def __str__(self) -> str:
        end = f"with exit status {self.late}" if self.late >= 0 else f"by {name_of_signal(-self.late)}"
        return (
            f"the process {self.pid} of local rank {self.local_rank} ended {end} while its last objects were "
            f"finalized; its program had ended before, with exit status {self.exitcode}, and that counts"
        )
