"""
Programs that others ship with their packages, which were written for torch's launcher: under elasticlib they end as
well as under torchrun, or better.

`elasticlib/docs/frameworks.md` has the table of outcomes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.starts import JOBS, LIMIT, environment, needs, script

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.25), needs("accelerate")]

ACCELERATES = ("test_script", "test_sync", "test_ops", "test_cli")
NOTEBOOKS = (
    ("test_can_initialize", "test_clean_cuda_fork", "test_static_rdzv_backend", "test_c10d_rdzv_backend"),
    ("test_monitoring",),
)
LAUNCHERS = {"elasticlib": ("elasticlib.run",), "torchrun": ("torch.distributed.run", "--standalone")}


def ends(folder: Path, *command: str) -> tuple[int, str]:
    """Exit status and stderr of a Python command with two processes on CPUs."""
    more = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_NUM_PROCESSES": "2"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode, done.stderr


def both_end_well(outcomes: dict[str, tuple[int, str]]) -> None:
    statuses = {launcher: status for launcher, (status, _) in outcomes.items()}
    stderr = "\n".join(text[-3000:] for status, text in outcomes.values() if status)

    assert {"elasticlib": 0, "torchrun": 0} == statuses, stderr


@pytest.mark.parametrize("program", ACCELERATES)
def test_accelerates_own_programs_end_well_under_both_launchers(program: str, tmp_path: Path) -> None:
    outcomes = {
        launcher: ends(tmp_path, "-m", *command, "--nproc-per-node=2", "-m", f"accelerate.test_utils.scripts.{program}")
        for launcher, command in LAUNCHERS.items()
    }

    both_end_well(outcomes)


@pytest.mark.parametrize("tests", NOTEBOOKS)
def test_accelerates_own_test_of_notebooks_ends_well_with_both_launchers(
    tests: tuple[str, ...], tmp_path: Path
) -> None:
    job = str(JOBS / "accelerate_notebook.py")

    outcomes = {launcher: ends(tmp_path, job, launcher, *tests) for launcher in LAUNCHERS}

    both_end_well(outcomes)


def test_a_notebooks_workers_restart_on_the_same_static_port(tmp_path: Path) -> None:
    """Accelerate's `test_fault_tolerant`: processes forked from the program itself, a static port, three restarts."""
    job = str(JOBS / "accelerate_notebook.py")

    outcomes = {launcher: ends(tmp_path, job, launcher, "test_fault_tolerant") for launcher in LAUNCHERS}

    both_end_well(outcomes)


LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
print(server.address(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of torchft's server, at which groups meet."""
    command = [sys.executable, "-c", LIGHTHOUSE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


@needs("torchft")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_dead_group_of_torchft_restarts_with_the_others_weights(
    launcher: str, lighthouse: str, tmp_path: Path
) -> None:
    """As its `train_ddp` is started: each group has a launcher of its own, and all groups meet at the lighthouse."""
    options = [*LAUNCHERS[launcher], "--nproc-per-node=1", "--max-restarts=2"]
    command = [sys.executable, "-m", *options, *script("with_torchft", tmp_path, 8, 3)]
    groups = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment() | {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(number)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(2)
    ]
    try:
        statuses = [group.wait(LIMIT) for group in groups]
    finally:
        for group in groups:
            group.kill()
            group.wait()

    one, other = (json.loads((tmp_path / f"group{number}.json").read_text()) for number in range(2))
    assert [0, 0] == statuses
    assert [(0, 8), (1, 8)] == [(seen["attempt"], seen["step"]) for seen in (one, other)]
    assert 3 == other["first"]
    assert one["weights"] == other["weights"]
