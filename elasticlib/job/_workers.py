"""
A job's workers on this machine: how each one is now, and what is left of their output.

Rules of this file: it is only looked, whatever state a worker is in; output goes with the process that has the job.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elasticlib.job import _output
from elasticlib.job._results import Place, Results
from elasticlib.job._status import Course, RankStatus, state_of
from elasticlib.rendezvous import host_name

if TYPE_CHECKING:
    from elasticlib.workers import WorkerNow


def status(worker: WorkerNow, rank: int, course: Course) -> RankStatus:
    """How *worker*, which has global *rank* in a job of this *course*, is now."""
    told = worker.progress
    return RankStatus(
        rank=rank,
        local_rank=worker.local_rank,
        node=course.node,
        host=host_name(),
        state=state_of(worker.pid, worker.exitcode, was_told=worker.was_told),
        pid=worker.pid,
        exitcode=worker.exitcode,
        restarts=course.restarts,
        step=None if told is None else told.step,
        total=None if told is None else told.total,
        metrics={} if told is None else told.metrics,
        age=None if told is None else told.age,
        last_line=_output.last_line([worker.stdout, worker.stderr]),
    )


def placed(values: Mapping[int, Any], course: Course) -> Results:
    """Results by rank, with where they come from."""
    place = Place(course.node, host_name(), course.round, course.restarts)
    return Results(values, dict.fromkeys(values, place))


def remove_output(folder: str, owner: int) -> None:
    """Remove *folder*, unless this is a forked child of the process *owner*, which still has it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
