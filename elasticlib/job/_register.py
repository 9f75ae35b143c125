"""
Registers of the running jobs of this process and of their GPUs.

They serve `jobs`, refuse to run a notebook's cell twice at the same time, and stop jobs at the end of
the program.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from elasticlib.errors import ConfigError, JobRunsError
from elasticlib.job import _gpu_shares
from elasticlib.workers import gpu_count, gpu_names

if TYPE_CHECKING:
    from elasticlib.job._job import Job

_log = logging.getLogger("elasticlib")


class Shares:
    """GPUs of the launches of this process, each from the check of the launch to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: list[_gpu_shares.GpuShare] = []
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # After a fork the entries, and a lock that is taken, are the parent's.
        self._lock, self._shares = threading.Lock(), []

    @contextlib.contextmanager
    def of(
        self, owner: str, requested: Sequence[int | str] | None, workers: int | str, *, is_started: bool
    ) -> Iterator[dict[str, str]]:
        """
        Reserve GPUs for *owner* within the block.

        Yields the variables that restrict its workers to these GPUs; {} if they may see all GPUs of this
        program. Raises `ConfigError` and `JobRunsError`.
        """
        may_share = requested is None and not is_started
        seen = _gpu_shares.seen_by(os.environ, gpu_count())
        names = gpu_names(os.environ)
        with self._lock:
            found = _gpu_shares.choose(requested, workers, seen, self._shares, may_share=may_share, names=names)
            share = _gpu_shares.GpuShare(owner, found or (), may_share)
            self._shares.append(share)

        has_all = requested is None and found == seen

        # Workers that may see all GPUs of this program inherit its own variables.
        variables = {}
        if found is not None and not has_all:
            variables = _gpu_shares.showing(found, os.environ)
        try:
            yield variables
        finally:
            with self._lock:
                self._shares = [each for each in self._shares if each is not share]


_HANDOVER_SECONDS = 90.0
"""Seconds that a program waits at its end until a batch system has its job, or has refused it."""


class Register:
    """The running jobs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Job] = []
        self._watches = False
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # After a fork the entries, and a lock that is taken, are the parent's.
        self._lock, self._running = threading.Lock(), []

    def running(self) -> list[Job]:
        """Return the running jobs, the oldest first."""
        with self._lock:
            return list(self._running)

    def add(self, job: Job, *, refuse: bool = False) -> None:
        """Add *job*; with *refuse* raise `JobRunsError` if the job of its cell's last run still runs."""
        with self._lock:
            other = next((each for each in self._running if refuse and _is_rerun(each, job)), None)
            if other is not None:
                raise JobRunsError(
                    f"{other!r} was started by this cell and is still running: wait for it (.result()) or "
                    "stop it (.stop()) first; elasticlib.jobs() lists it"
                )

            self._running.append(job)
            if not self._watches:
                self._watches = True
                atexit.register(self._stop_all)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        with self._lock:
            if job in self._running:
                self._running.remove(job)

    def _stop_all(self) -> None:
        """Stop all jobs at the end of the program."""
        running = self.running()
        left = [job for job in running if not job.outlives_program]
        for job in running:
            if job.outlives_program:
                _let_go(job)

        for job in left:
            if not job.is_owned:
                _log.warning(
                    "%r was still running when its program ended, so it is stopped; call result() to wait for a job",
                    job,
                )
            job.stop(wait=False)

        for job in left:
            # Waited for after all were asked to stop, so that they end at the same time.
            job.ends_with_program()


def _let_go(job: Job) -> None:
    """Wait until a batch system has *job*, which continues there after the end of its program."""
    if job.is_handed_over(_HANDOVER_SECONDS):
        _log.warning("%r continues after the end of its program", job)
    else:
        _log.error("%r was not submitted before its program ended: %s", job, job.exception() or "no answer")


def _is_rerun(former: Job, job: Job) -> bool:
    """Return True if both belong to the same cell, which was executed again meanwhile."""
    if former.cell is None or job.cell is None or not former.started:
        return False
    # One run of a cell may start several jobs, so only another run of it is refused.
    return former.cell.identity == job.cell.identity and former.cell.execution != job.cell.execution


def refuse_in_child(name: str, owner: int) -> None:
    """Raise `ConfigError` in a process that was forked from *owner*, which runs the job *name*."""
    if os.getpid() != owner:
        raise ConfigError(
            f"job {name!r} runs in process {owner}, and this process ({os.getpid()}) is a fork of it: only "
            f"process {owner} can wait for the job, query it and stop it"
        )


RUNNING_JOBS = Register()
GPU_SHARES = Shares()


def jobs() -> list[Job]:
    """Return the running jobs of this process, the oldest first: started jobs, and calls in other threads."""
    return [job for job in RUNNING_JOBS.running() if job.is_listed]
