"""`requeue`: the questions to Slurm, and what follows from its answers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from elasticlib.engines import requeue

ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a program with that name, which shows the file ``job`` and notes requests in ``calls``."""
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"case $1 in requeue) cat {tmp_path}/refusal >&2 2>/dev/null && exit 1; exit 0;; esac\ncat {tmp_path}/job\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def requests(folder: Path) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith("requeue")]


@pytest.mark.parametrize(
    ("job", "why_not", "requeued"),
    [
        ("JobId=7 JobState=RUNNING Restarts=1", "", True),
        ("JobId=7 JobState=COMPLETING Restarts=1", "", True),
        ("JobId=7 JobState=CANCELLED Restarts=1", "it was cancelled", False),
        # So it is after scancel, until all processes are gone.
        ("JobId=7 JobState=COMPLETING Restarts=1 Reason=None PreemptTime=None", "it was cancelled", False),
        ("JobId=7 JobState=COMPLETING Restarts=1 Reason=NodeDown PreemptTime=None", "", True),
        ("JobId=7 JobState=COMPLETING Restarts=1 Reason=None PreemptTime=1790000000", "", True),
        ("JobId=7 JobState=COMPLETING Restarts=2 Reason=None PreemptTime=None", "", False),
        ("", "does not say", False),
        # Another node was first.
        ("JobId=7 JobState=COMPLETING Restarts=2", "", False),
        ("JobId=7 JobState=PENDING Restarts=1", "", False),
    ],
)
def test_a_job_is_requeued_once(scontrol: Path, job: str, why_not: str, requeued: bool) -> None:
    (scontrol / "job").write_text(job)

    assert why_not in requeue(ENVIRON)
    assert (["requeue 7"] if requeued else []) == requests(scontrol)


def test_a_refusal_of_slurm_is_the_reason(scontrol: Path) -> None:
    (scontrol / "job").write_text("JobId=7 JobState=RUNNING Restarts=1")
    (scontrol / "refusal").write_text("Requested operation is presently disabled")

    assert "Requested operation is presently disabled" == requeue(ENVIRON)


def test_requeue_reports_missing_answer_without_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert "does not say" in requeue(ENVIRON)
