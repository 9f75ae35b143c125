"""Steps of a real Slurm that end while they train: ranks save at one step, and the status says who ended the job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster, Job

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

TRAIN = """
import os, time, torch, torch.distributed as dist, elasticlib
dist.init_process_group("gloo")
for step in range(1_000_000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
    if step == 3:
        print("trains\\n", end="", flush=True)
    if stop := elasticlib.should_stop():
        print("saved", os.environ["RANK"], step, "\\n", end="", flush=True)
        break
"""


def start(slurm: Cluster, folder: Path, header: str = "") -> Job:
    """Return a job of two nodes that trains."""
    started = slurm.start(folder, TRAIN, "srun --kill-on-bad-exit=0 elasticrun train.py", header=header)
    started.wait_for_output("trains", times=2)
    return started


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Job:
    return start(slurm, tmp_path)


def steps_of_saves(output: str) -> set[str]:
    found = dict(re.findall(r"^saved (\d) (\d+)", output, re.MULTILINE))
    assert {"0", "1"} == found.keys(), output
    return set(found.values())


def test_a_notice_of_the_scheduler_is_a_preemption(job: Job) -> None:
    job.cancel("--signal=TERM")
    job.ends()

    assert 1 == len(steps_of_saves(job.output))
    assert "status 75" in job.output


def test_job_cancelled_by_its_owner_does_not_count_as_preempted(job: Job) -> None:
    job.cancel()

    assert "CANCELLED" == job.ends()
    assert 1 == len(steps_of_saves(job.output))
    assert "exit code 75" not in job.output and "Exited with exit code 1" in job.output, job.output


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_signal_before_the_end_is_a_preemption(job: Job, name: str) -> None:
    """As ``sbatch --signal=USR1@90`` sends it, to every process of the step."""
    job.cancel(f"--signal={name}")
    job.ends()

    assert 1 == len(steps_of_saves(job.output))
    assert "status 75" in job.output


def test_the_end_of_the_time_is_a_preemption(slurm: Cluster, tmp_path: Path) -> None:
    job = start(slurm, tmp_path, "#SBATCH --time=1\n")
    job.ends(limit=120.0)

    assert 1 == len(steps_of_saves(job.output))
    assert "status 75" in job.output and "the job's time ends at" in job.output
