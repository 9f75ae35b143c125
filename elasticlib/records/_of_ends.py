"""
What people should know of the ends of workers.

Rules of this file: a record holds facts; its text is made from them, here.
"""

from __future__ import annotations

import logging

from attrs import frozen

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
