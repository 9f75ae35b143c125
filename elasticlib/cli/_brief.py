"""
The short report of `elasticrun` on a terminal: one line at the start of a job, and one at its end.

Rules of this file: it writes nothing if stderr is not a terminal, so that logs and pipes contain only
the program's output.
"""

from __future__ import annotations

from typing import TextIO

from elasticlib import records
from elasticlib._wording import counted, duration
from elasticlib.job import JobStatus
from elasticlib.records import Record


class Brief:
    """Report on the job *name*, written to *terminal* after the name of *program*."""

    def __init__(self, program: str, name: str, terminal: TextIO) -> None:
        self._head = f"{program}: {name}:"
        self._terminal = terminal
        self._is_announced = False

    def sink(self, record: Record) -> None:
        """Write the size of the first round."""
        # Later rounds are not announced: the last line has the number of restarts.
        if isinstance(record, records.RoundStarted) and not self._is_announced:
            self._is_announced = True
            self._say(size_of(record.group_world_size, record.world_size, len(record.pids)))

    def end(self, status: JobStatus) -> None:
        """Write the outcome of the job, if its first round was reported."""
        if self._is_announced:
            self._say(outcome_of(status))

    def _say(self, what: str) -> None:
        try:
            # In one write: workers write to the same terminal, and an unbuffered stream splits a print.
            self._terminal.write(f"{self._head} {what}\n")
            self._terminal.flush()
        # The terminal is closed, but the job continues.
        except OSError:
            self._is_announced = False


def size_of(nodes: int, ranks: int, here: int) -> str:
    """Return the numbers of nodes and ranks of a round; *here* are the ranks on this node."""
    # Nodes may have different numbers of workers.
    if nodes * here == ranks:
        return f"{counted(nodes, 'node')} x {counted(here, 'rank')}"
    return f"{counted(nodes, 'node')} with {counted(ranks, 'rank')} in all, {here} here"


def outcome_of(status: JobStatus) -> str:
    """Return the final state of a job, its duration and its number of restarts."""
    return f"{status.state} after {duration(status.seconds, 1)}, {counted(status.restarts, 'restart')}"
