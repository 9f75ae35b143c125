"""
The errors of a pool's calls: of functions that raised, and of workers that ended before they answered.

Rules of this file: what the job sees as a failure is told as the job tells it; to the job a worker that ends with exit
status 0 is a success, and its others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping

from elasticlib._clock import wall_time
from elasticlib.errors import ChildFailedError, ConfigError, ProcessFailure
from elasticlib.job import Job, combined_error, trace_of
from elasticlib.workers import Exit, failure_of, original_exception
from elasticlib.workers.child import Report

_LOOK = 0.01
"""Seconds between two looks."""


def call_error(
    job: Job,
    title: str,
    reports: Mapping[int, Report],
    died: Mapping[int, ProcessFailure],
    raise_as: str,
    item: int | None,
) -> ChildFailedError:
    """
    Return the error of a call that failed.

    *reports* are those of the ranks on which the function raised, *died* the failures of workers that have ended;
    *item* is the item of a `Pool.map`.
    """
    pids = {each.rank: each.pid for each in job.status().ranks}
    failures = dict(died)
    causes: dict[int, BaseException | None] = {}
    for rank, report in reports.items():
        end = Exit(rank, pids.get(rank, 0), 1, False, report, "")
        failures[rank] = failure_of(end, rank, "", None, 0, wall_time())
        failures[rank].hint = _hint(report)
        causes[rank] = original_exception(end)
    error = ChildFailedError(title, dict(sorted(failures.items())))
    cause = causes.get(error.get_first_failure()[0])
    found = combined_error(error, cause, raise_as)
    found._elastic_item = item
    return found.with_traceback(trace_of(found, None))


def _hint(report: Report) -> str:
    # Torch raises a ValueError here, as for anything else that is wrong with the call: only its text tells them apart.
    if "initialize the default process group twice" in report.message:
        return (
            "the pool has made the process group already: leave init_process_group out, or have none made, by "
            "pool(..., group=None)"
        )
    return ""


def death(job: Job, ranks: Collection[int], wait: Callable[[float], object]) -> ChildFailedError:
    """
    Return the error for *ranks*, which have ended in the midst of a call and failed nothing but that.

    Raises what ends the job, where something does. *wait* waits for its end, for some seconds at most.
    """
    while not _has_seen_end(job, ranks):
        wait(_LOOK)  # the kernel tells an end before the job does
    pids = {each.rank: each.pid for each in job.status().ranks}
    failures = {}
    for rank in sorted(ranks):
        end = Exit(rank, pids.get(rank, 0), 0, False, None, "")
        failures[rank] = failure_of(end, rank, "", _output(job, rank), 0, wall_time())
        failures[rank].message = "ended with exit status 0 in the midst of a call"
    return ChildFailedError(job.name, failures)


def _has_seen_end(job: Job, ranks: Collection[int]) -> bool:
    """Return whether *job* knows that *ranks* have ended. Raises what ends it, where something does."""
    status = job.status()
    codes = {each.rank: each.exitcode for each in status.ranks}
    is_ending = job.done() or status.state == "stopping" or any(codes.values())
    if is_ending:
        job.result()
        return True
    return all(codes.get(rank) == 0 for rank in ranks)


def _output(job: Job, rank: int) -> str | None:
    """Return the file with the latest output of that rank."""
    with contextlib.suppress(ConfigError):  # it is in none
        return next(reversed(job.files(rank)), None)
    return None
