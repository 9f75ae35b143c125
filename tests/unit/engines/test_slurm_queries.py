"""Questions to Slurm, with a program in place of ``scontrol``."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticlib.engines import is_cancelled, reachable

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


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "12"}])
def test_outside_a_step_no_job_of_slurm_is_cancelled(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch, "echo JobState=CANCELLED")

    assert not is_cancelled(environ)
