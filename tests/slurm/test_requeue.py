"""Jobs of a real Slurm that come back after a notice, and go on where they were; cancelled and failed ones do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve

from tests.slurm._cluster import Cluster, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

TRAIN = """
import os, pathlib, time, torch, torch.distributed as dist, elasticlib
dist.init_process_group("gloo")
saved = pathlib.Path("saved")
first = int(saved.read_text()) if saved.exists() else 0
dist.barrier()
print("from", first, "\\n", end="", flush=True)
for step in range(first, 1_000_000):
    if os.environ.get("FAILS") and step == 100:
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
    if step == first + 3:
        print("trains\\n", end="", flush=True)
    if not os.environ.get("NEVER_ASKS") and elasticlib.should_stop():
        if dist.get_rank() == 0:
            saved.write_text(str(step + 1))
        dist.barrier()
        break
"""


HEADER = "#SBATCH --requeue\n#SBATCH --open-mode=append\necho start ${SLURM_RESTART_COUNT:-0}\n"


def start(slurm: Cluster, folder: Path, *options: str, command: str = "elasticrun --requeue 1 train.py") -> Job:
    return slurm.start(folder, TRAIN, f"srun --kill-on-bad-exit=0 {command}", *options, header=HEADER)


def test_preempted_job_returns_to_its_step_as_often_as_allowed(slurm: Cluster, tmp_path: Path) -> None:
    job = start(slurm, tmp_path)
    job.wait_for_output("trains", times=2)

    job.cancel("--signal=TERM")
    wait_until(lambda: job.facts()["JobState"] == "PENDING")
    wait_until(lambda: set(slurm.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"})
    job.start_again()
    job.wait_for_output("start 1")
    job.wait_for_output("trains", times=4)
    job.cancel("--signal=USR1")
    job.ends()

    (again,) = set(re.findall(r"from ([1-9]\d*)", job.output))
    assert int(again) > 3
    assert "start 2" not in job.output and "status 75" in job.output
    assert 1 == int(job.facts()["Restarts"])


def test_job_is_requeued_although_its_ranks_never_check_for_notices(slurm: Cluster, tmp_path: Path) -> None:
    """The scheduler ended it, whether or not a checkpoint of the last step exists."""
    command = "elasticrun --max-restarts 0 --shutdown-timeout 3 --requeue 1 train.py"
    job = start(slurm, tmp_path, "--export=ALL,NEVER_ASKS=1", command=command)
    job.wait_for_output("trains", times=2)

    job.cancel("--signal=TERM")
    wait_until(lambda: job.facts()["JobState"] == "PENDING", what=lambda: job.output)
    job.cancel()

    # Slurm ends the launcher at the requeue, often before it has written so.
    assert 1 == int(job.facts()["Restarts"]), job.output


def test_only_the_preempted_task_of_an_array_is_requeued(slurm: Cluster, tmp_path: Path) -> None:
    """The last task has the number of the whole array, by which Slurm's commands change all tasks."""
    array = start(slurm, tmp_path, "--nodes=1", "--array=0-1")
    array.wait_for_output("trains", times=2)
    first, last = (evolve(array, number=f"{array.number}_{task}") for task in (0, 1))
    assert last.facts()["JobId"] == array.number

    last.cancel("--signal=TERM")
    wait_until(lambda: last.facts()["JobState"] == "PENDING", what=lambda: array.output)
    assert ("RUNNING", "0") == (first.facts()["JobState"], first.facts()["Restarts"])
    array.cancel()

    assert "CANCELLED" == first.ends() == last.ends()


def test_a_standalone_job_of_one_task_is_requeued(slurm: Cluster, tmp_path: Path) -> None:
    job = start(slurm, tmp_path, "--nodes=1", command="elasticrun --standalone --requeue 1 train.py")
    job.wait_for_output("trains")

    job.cancel("--signal=TERM")
    wait_until(lambda: job.facts()["JobState"] == "PENDING", what=lambda: job.output)
    job.cancel()

    # Slurm ends the launcher at the requeue, often before it has written so.
    assert 1 == int(job.facts()["Restarts"]), job.output


@pytest.mark.parametrize("options", [[], ["--nodes=1"]])
def test_cancelled_job_is_not_requeued(slurm: Cluster, tmp_path: Path, options: list[str]) -> None:
    job = start(slurm, tmp_path, *options, command=f"elasticrun {'--standalone ' * len(options)}--requeue 1 train.py")
    job.wait_for_output("trains", times=2 - len(options))

    job.cancel()

    assert "CANCELLED" == job.ends()
    assert 0 == int(job.facts()["Restarts"])


def test_job_whose_program_fails_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    options = "--requeue 1 --max-restarts 0 --failure-exit 93"
    job = start(slurm, tmp_path, "--export=ALL,FAILS=1", command=f"elasticrun {options} train.py")

    assert "COMPLETED" == job.ends()
    assert 0 == int(job.facts()["Restarts"])
    assert "status 93" in job.output, job.output
