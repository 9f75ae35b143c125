"""What a worker leaves behind, in files that the spawner holds until the launcher has them."""

from __future__ import annotations

import contextlib
import os

from elasticlib import processes
from elasticlib.processes import files_with_content


class Left:
    """The files of one worker; `close` once the launcher has them."""

    def __init__(self) -> None:
        self._reports: list[int] = []
        report, self.faults, self.tail = [processes.anonymous_file(name) for name in ("report", "faults", "tail")]
        self._reports.append(report)

    @property
    def report(self) -> int:
        """Where the worker leaves its result or its error."""
        return self._reports[0]

    def reports(self) -> tuple[int, ...]:
        """All files that have the report."""
        return tuple(self._reports)

    def all(self) -> tuple[int, ...]:
        """The report, the stacks of a crash, the last lines of stderr, and where there is more of the report."""
        return self.report, self.faults, self.tail, *self._reports[1:]

    def put_report(self, packed: bytes) -> None:
        """Take a report that came through the pipe, since the worker could have no file that is so large."""
        with contextlib.suppress(OSError):  # no descriptor is left: the launcher finds that the report is missing
            former, self._reports = self._reports, files_with_content(packed, "report")
            for descriptor in former:
                os.close(descriptor)

    def close(self) -> None:
        """Let go of them."""
        for descriptor in self.all():
            os.close(descriptor)
