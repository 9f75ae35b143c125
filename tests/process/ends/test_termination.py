"""The end of a command for its scheduler: termination log and exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.launches import Program, environment

pytestmark = pytest.mark.slow

FAILS = "raise ValueError('bad batch')\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


def ends(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """The status of a launch of *script*, and its output."""
    (folder / "train.py").write_text(script)
    program = Program(
        *("-m", "elasticlib.run", "--preload", "", "--max-restarts", "0", *options, str(folder / "train.py")),
        env=environment(),
        start_new_session=True,
    )
    try:
        return program.ends()
    finally:
        program.close()


@pytest.mark.parametrize(("script", "status", "is_final"), [(FAILS, 93, True), (KILLED, 1, False)])
def test_a_failure_of_the_program_itself_has_a_status_of_its_own(
    tmp_path: Path, script: str, status: int, is_final: bool
) -> None:
    log = tmp_path / "termination"
    found, output = ends(tmp_path, script, "--failure-exit", "93", "--termination-log", str(log))

    text = log.read_text()
    assert status == found, output
    assert text.startswith("rank 0") and 1 == text.count("\n")
    assert is_final == ("another try would fail again" in text)
    assert not is_final or "ValueError: bad batch (train.py:1)" in text


def test_a_success_writes_no_termination_log(tmp_path: Path) -> None:
    status, output = ends(tmp_path, "", "--termination-log", str(tmp_path / "termination"))

    assert 0 == status, output
    assert not (tmp_path / "termination").exists()


@pytest.mark.parametrize("name", ["missing/log", ".", "train.py/log", "x" * 300])
def test_a_termination_log_that_cannot_be_written_is_a_warning(tmp_path: Path, name: str) -> None:
    status, output = ends(tmp_path, FAILS, "--failure-exit", "93", "--termination-log", str(tmp_path / name))

    assert 93 == status, output
    assert 1 == output.count("the termination log cannot be written") and "bad batch" in output


def test_a_job_outside_of_slurm_cannot_be_requeued(tmp_path: Path) -> None:
    status, output = ends(tmp_path, "", "--requeue", "2")

    assert 2 == status and "--requeue 2: this process is not in a step of Slurm" in output, output
