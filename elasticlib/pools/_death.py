"""
What the end of a worker that owes an answer is, whatever its exit status.

Rules of this file: what the job sees as a failure is told as the job tells it; to the job a worker that ends with exit
status 0 is a success, and its others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from elasticlib._clock import wall_time
from elasticlib.errors import ChildFailedError, ConfigError
from elasticlib.job import Job
from elasticlib.workers import Exit, failure_of

_LOOK = 0.01
"""Seconds between two looks."""


def death(job: Job, ranks: Collection[int], wait: Callable[[float], object]) -> ChildFailedError:
    """
    The error for *ranks*, which have ended in the midst of a call and failed nothing but that.

    Raises what ends the job, where something does. *wait* waits for its end, for some seconds at most.
    """
    while True:
        status = job.status()
        codes = {each.rank: each.exitcode for each in status.ranks}
        if job.done() or status.state == "stopping" or any(codes.values()):
            job.result()
            break
        if all(codes.get(rank) == 0 for rank in ranks):
            break
        wait(_LOOK)  # the kernel tells an end before the job does
    pids = {each.rank: each.pid for each in job.status().ranks}
    failures = {}
    for rank in sorted(ranks):
        end = Exit(rank, pids.get(rank, 0), 0, False, None, "")
        failures[rank] = failure_of(end, rank, "", _output(job, rank), 0, wall_time())
        failures[rank].message = "ended with exit status 0 in the midst of a call"
    return ChildFailedError(job.name, failures)


def _output(job: Job, rank: int) -> str | None:
    """The file with what that rank has written last."""
    with contextlib.suppress(ConfigError):  # it is in none
        return next(reversed(job.files(rank)), None)
    return None
