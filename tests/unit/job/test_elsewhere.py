"""Questions to a job whose workers are on other machines."""

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

    def __init__(self, elsewhere: Any) -> None:
        self.elsewhere = elsewhere
        self.runs, self.may_end = threading.Event(), threading.Event()

    def abandon(self) -> None:
        raise AssertionError("the job has begun")

    def __call__(self, job: Job) -> Results:
        job.attach_elsewhere(self.elsewhere)
        self.runs.set()
        assert self.may_end.wait(60)
        return Results()


def test_files_of_another_machine_are_not_returned() -> None:
    class Elsewhere:
        def course(self) -> JobCourse:
            return JobCourse()

        def ranks(self) -> tuple[()]:
            return ()

    work = Work(Elsewhere())
    job = Job(work).begin()
    assert work.runs.wait(60)

    with pytest.raises(ConfigError, match=r"the output files of rank 3 are on its own machine: call logs\(3\)"):
        job.files(3)
    work.may_end.set()
    job.result(60)
