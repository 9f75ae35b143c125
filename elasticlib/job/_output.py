"""
The output of a job that runs beside its program: one file for each worker, read while it grows.

Rules of this file: stdout and stderr of a worker go to one file, in their order; of rank 0 they go to the console too.
The files stay as long as the job's object; after a failure they stay for a look.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import LogsDest, Std

_TAIL = 8192
"""Bytes at the end of a file in which its last line is looked for."""


class JobLogs(DefaultLogsSpecs):
    """Where the output goes unless `LaunchConfig.logs_specs` says it."""

    default_prefix = ""
    """Before lines on the console, which are of one rank."""

    def __init__(self) -> None:
        super().__init__(redirects=Std.ALL)

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """One file for each rank, shown where it is rank 0."""
        dest = super().reify(envs)
        for rank, path in dest.stderrs.items():
            os.unlink(path)
            dest.stderrs[rank] = dest.stdouts[rank]
        dest.tee_stdouts = {rank: dest.stdouts[rank] for rank, env in envs.items() if env.get("RANK") == "0"}
        return dest

    def temporary_round(self) -> str:
        """None that an agent may remove: the job's object does so."""
        return ""

    def remove_if_temporary(self, only_if_empty: bool = False) -> None:
        """After success they are still there to be read; after a failure they stay for a look."""
        if only_if_empty:
            super().remove_if_temporary(only_if_empty)


def text_of(path: str) -> str:
    """What is in the file by now; bytes that are no UTF-8 show as U+FFFD."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return file.read()


def last_line(path: str) -> str:
    """The last line with something in it, as a terminal would show it; empty where there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        for line in reversed(file.read().decode("utf-8", "replace").splitlines()):
            if line.strip():
                return line.strip()
    return ""
