"""Questions to Slurm, with a program in place of ``scontrol``."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticlib.engines import end_of_job, is_cancelled, reachable, requeue

NAME = "node.invalid"
"""A name that no resolver knows (RFC 6761)."""


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make *script* the ``scontrol`` of this process."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_name_that_resolves_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo NodeName=localhost NodeAddr=10.0.0.9")

    assert "localhost:20001" == reachable("localhost:20001")


def test_slurm_knows_the_address_of_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, f'[ "$4" = {NAME} ] && echo "NodeName=$4 NodeAddr=10.0.0.9 NodeHostName=$4"')

    assert "10.0.0.9:20001" == reachable(f"{NAME}:20001")


@pytest.mark.parametrize("script", ["exit 1", "echo what", f"echo NodeAddr={NAME}", "printf '\\377'"])
def test_without_an_answer_the_name_stays(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, script)

    assert f"{NAME}:20001" == reachable(f"{NAME}:20001")


def test_without_slurms_programs_the_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert f"{NAME}:20001" == reachable(f"{NAME}:20001")


@pytest.mark.parametrize(
    ("script", "is_over"),
    [
        ('[ "$3 $4" = "job 12" ] && echo "JobId=12 JobName=x JobState=CANCELLED Reason=None"', True),
        ("echo JobId=12 JobState=COMPLETING Reason=None ExitCode=0:15 PreemptTime=None", True),
        ("echo JobId=12 JobState=COMPLETING Reason=TimeLimit PreemptTime=None", False),
        ("echo JobId=12 JobState=COMPLETING Reason=None PreemptTime=2026-11-28T20:32:05", False),
        ("echo JobId=12 JobState=COMPLETING Reason=None PreemptTime=None Restarts=1", False),
        ("echo JobId=12 JobState=TIMEOUT Reason=TimeLimit", False),
        ("echo JobId=12 JobState=RUNNING Reason=None", False),
        ("exit 1", False),
    ],
)
def test_a_cancelled_job_is_one_that_slurm_calls_so(
    script: str, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch, script)

    assert is_over == is_cancelled({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})


TASKS = """case "$4" in
9_1) echo JobId=9 ArrayTaskId=1 JobState=RUNNING Restarts=0 EndTime=2000;;
9_0) echo JobId=10 ArrayTaskId=0 JobState=CANCELLED Restarts=0 EndTime=1000;;
9) echo JobId=9 ArrayTaskId=1 JobState=RUNNING EndTime=2000; echo JobId=10 JobState=CANCELLED Restarts=1 EndTime=1000;;
esac
[ $1 = requeue ] && echo "$2" >> requeued
true"""
"""The first task is cancelled; the second one runs, and has the number of the whole array."""


def task_of_array(task: int) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": str(task)}
    return {**step, "SLURM_JOB_ID": "9" if task else "10"}


def test_a_task_of_an_array_has_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, TASKS)

    assert [True, False] == [is_cancelled(task_of_array(task)) for task in (0, 1)]
    assert [1000, 2000] == [end_of_job(task_of_array(task)) for task in (0, 1)]


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, TASKS)
    monkeypatch.chdir(tmp_path)

    assert "" == requeue(task_of_array(1))
    assert "9_1\n" == (tmp_path / "requeued").read_text()


def test_a_job_of_several_components_has_the_state_of_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch, "echo JobId=12 JobState=CANCELLED; echo JobId=13 JobState=RUNNING")

    assert is_cancelled({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "12"}])
def test_outside_a_step_no_job_of_slurm_is_cancelled(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch, "echo JobState=CANCELLED")

    assert not is_cancelled(environ)
