"""
The workers of a job of a batch system, as a client knows them by the reports of its nodes.

Rules of this file: any thread may ask. Files are read only for a question, and none is written: nodes and other clients
do not notice it.
"""

from __future__ import annotations

import math
import threading
from typing import NoReturn

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError
from elasticlib.job import JobCourse, RankStatus
from elasticlib.remote._batch_files import BatchFolder
from elasticlib.remote._node_reports import NodeReport, course_of, ranks_of, seconds_between_reports


class WorkersOfBatch:
    """The workers of all nodes; fulfils `elasticlib.job.WorkersElsewhere`. *silence*: why they answer no questions."""

    def __init__(self, folder: BatchFolder, nodes: int, silence: str) -> None:
        self._folder, self._silence = folder, silence
        self._seconds = seconds_between_reports(nodes)
        self._lock = threading.Lock()
        self._reports: dict[str, NodeReport] = {}
        """The last report of each node in the present run, by its file's name."""
        self._read_at = -math.inf
        self._restarts = 0
        self._is_pending = True

    # For the thread of the call.

    def note_state(self, restarts: int, *, is_pending: bool) -> None:
        """Note the restarts of the job, and whether its present run waits in the queue."""
        with self._lock:
            if restarts != self._restarts:
                # The workers of an earlier run exist no more.
                self._reports, self._read_at = {}, -math.inf
            self._restarts, self._is_pending = restarts, is_pending

    def end(self, *, is_over: bool) -> None:
        """Read the last reports, before the folder is removed; *is_over*: the job has no processes any more."""
        with self._lock:
            self._read()
            if is_over:
                self._reports = {name: each.after_the_end() for name, each in self._reports.items()}
            self._read_at = math.inf

    # For any thread.

    def course(self) -> JobCourse:
        """Return the state of the job by the reports of its nodes."""
        return course_of(self._present())

    def ranks(self) -> tuple[RankStatus, ...]:
        """Return the status of the workers of all nodes, by rank."""
        return ranks_of(self._present())

    def stacks(self, timeout: float) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(self._silence)

    def logs(self, rank: int) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(self._silence)

    def _present(self) -> list[NodeReport]:
        """Return the reports of the nodes of the newest round."""
        with self._lock:
            if self._is_pending:
                return []
            if monotonic() >= self._read_at + self._seconds:
                self._read()
            newest = max((each.round for each in self._reports.values()), default=-1)
            # A node that was lost leaves its last report.
            return [each for each in self._reports.values() if each.round == newest]

    def _read(self) -> None:
        self._read_at = monotonic()
        names = [name for (restarts, _), name in self._folder.reports().items() if restarts == self._restarts]
        found = {name: report for name in names if (report := self._report(name)) is not None}
        # A file that cannot be read for a moment, or is removed with its folder, changes nothing.
        self._reports |= found

    def _report(self, name: str) -> NodeReport | None:
        """Return the report in the file *name*; None if it is not that of a node, or cannot be read now."""
        try:
            return NodeReport.unpacked(self._folder.read(name))
        except (OSError, ValueError, KeyError, TypeError):
            return None
