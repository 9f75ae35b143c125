"""Questions to a job whose workers are on other machines, or answer no program."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.job import Job, JobCourse, Results


class Work:
    """Work of a job that is told where its workers are, and ends once `may_end` is set."""

    title = "train"
    grace = 5.0
    signums = ()
    folder = ""
    quit_shows_stacks = False
    outlives_program = False

    def __init__(self, silence: str, elsewhere: Any = None) -> None:
        self.silence, self.elsewhere = silence, elsewhere
        self.runs, self.may_end = threading.Event(), threading.Event()

    def abandon(self) -> None:
        raise AssertionError("the job has begun")

    def __call__(self, job: Job) -> Results:
        job.note_silence(self.silence)
        if self.elsewhere is not None:
            job.attach_elsewhere(self.elsewhere)
        self.runs.set()
        assert self.may_end.wait(60)
        return Results()


def test_workers_of_a_batch_job_are_not_asked() -> None:
    work = Work("the workers do not answer: read their output in /shared/output")
    job = Job(work).begin()
    assert work.runs.wait(60)

    for ask in (job.stacks, job.logs, lambda: job.files(0), lambda: job.logs(0, follow=True)):
        with pytest.raises(ConfigError, match="read their output in /shared/output"):
            ask()
    work.may_end.set()
    job.result(60)


def test_files_of_another_machine_are_not_returned() -> None:
    class Elsewhere:
        def course(self) -> JobCourse:
            return JobCourse()

        def ranks(self) -> tuple[()]:
            return ()

    work = Work("", Elsewhere())
    job = Job(work).begin()
    assert work.runs.wait(60)

    with pytest.raises(ConfigError, match=r"the output files of rank 3 are on its own machine: call logs\(3\)"):
        job.files(3)
    work.may_end.set()
    job.result(60)
