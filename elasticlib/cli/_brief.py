"""
What `elasticrun` says of a job on a terminal: a line when it starts, and one when it has ended.

Rules of this file: nothing is said where stderr is no terminal, so that logs and pipes hold the program's output alone.
"""

from __future__ import annotations

from typing import TextIO

from elasticlib import records
from elasticlib._wording import counted, duration
from elasticlib.job import JobStatus
from elasticlib.records import Record


class Brief:
    """Says it of the job *name* to *terminal*, in the name of *program*."""

    def __init__(self, program: str, name: str, terminal: TextIO) -> None:
        self._head = f"{program}: {name}:"
        self._terminal = terminal
        self._is_announced = False

    def sink(self, record: Record) -> None:
        """Say of the first round how large it is."""
        if isinstance(record, records.RoundStarted) and not self._is_announced:
            self._is_announced = True
            self._say(size_of(record.group_world_size, record.world_size, len(record.pids)))

    def end(self, status: JobStatus) -> None:
        """Say how the job has ended."""
        if self._is_announced:
            self._say(outcome_of(status))

    def _say(self, what: str) -> None:
        try:
            print(self._head, what, file=self._terminal, flush=True)
        # The terminal is gone, and the job goes on.
        except OSError:
            self._is_announced = False


def size_of(nodes: int, ranks: int, here: int) -> str:
    """Return how many nodes and ranks a round has, of which so many are *here*."""
    if nodes * here == ranks:
        return f"{counted(nodes, 'node')} x {counted(here, 'rank')}"
    return f"{counted(nodes, 'node')} with {counted(ranks, 'rank')} in all, {here} here"


def outcome_of(status: JobStatus) -> str:
    """Return how a job has ended, after what time and how many restarts."""
    return f"{status.state} after {duration(status.seconds, 1)}, {counted(status.restarts, 'restart')}"
