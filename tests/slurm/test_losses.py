"""Machines of a real Slurm that die while a job trains on them, and nodes that a job frees while another one runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster, Job, cluster, missing
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
step, limit = 0, float(sys.argv[1]) if len(sys.argv) > 1 else 600
for step in range(int(limit / 0.02)):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
    if step == 3 and dist.get_rank() == 0:
        facts = os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("trains on", *facts, "\\n", end="", flush=True)
"""
HEADER = "#!/bin/bash\n#SBATCH --ntasks-per-node=1 --no-kill\n"
SRUN = "srun --no-kill --wait=0 --kill-on-bad-exit=0 elasticrun --nproc-per-node 1 --max-restarts 3"


@pytest.fixture
def losing() -> Iterator[Cluster]:
    """Four nodes for one test, which may lose them."""
    if why := missing():
        pytest.skip(why)
    with cluster(4) as found:
        yield found


def started(slurm: Cluster, folder: Path, options: str, *of_batch: str) -> Job:
    """Return a job that trains."""
    (folder / "train.py").write_text(TRAIN)
    script = folder / "job.sh"
    script.write_text(f"{HEADER}{SRUN} {options}\necho status $?\n")
    job = slurm.submit(script, *of_batch)
    job.wait_for_output("trains on")
    return job


def started_with_files(slurm: Cluster, folder: Path, nnodes: str, nodes: int) -> Job:
    """Return a job that trains, whose nodes write to files of their own: srun runs on the head, which is to be lost."""
    command = f"bash -c 'exec elasticrun --nproc-per-node 1 --nnodes {nnodes} train.py > node.$SLURM_PROCID 2>&1'"
    (folder / "train.py").write_text(TRAIN)
    script = folder / "job.sh"
    script.write_text(f"{HEADER}srun --no-kill --wait=0 --kill-on-bad-exit=0 {command}\n")
    job = slurm.submit(script, f"--nodes={nodes}", "--no-requeue")
    wait_until(lambda: "trains on" in output_of(folder, 0), what=lambda: job.output)
    return job


def test_a_lost_node_costs_neither_budget_nor_allocation(losing: Cluster, tmp_path: Path) -> None:
    job = started(losing, tmp_path, "--nnodes 3:4 train.py", "--nodes=4")

    losing.workers[2].lose()
    began = time.monotonic()
    job.wait_for_output("trains on 3 0")
    print(f"trained again {time.monotonic() - began:.1f} s after the loss")

    assert "RUNNING" == job.facts()["JobState"]


def test_survivors_end_soon_after_the_loss_of_the_head(losing: Cluster, tmp_path: Path) -> None:
    job = started_with_files(losing, tmp_path, "3:4", 4)

    losing.workers[0].lose()
    began = time.monotonic()
    # The first one that gives up may end the others, by giving the allocation back.
    wait_until(lambda: any(has_given_up(tmp_path, node) for node in (1, 2, 3)), what=lambda: output_of(tmp_path, 1))
    print(f"ended {time.monotonic() - began:.1f} s after the loss")
    wait_until(lambda: job.facts()["JobState"] != "RUNNING", what=lambda: output_of(tmp_path, 1))
    print(f"allocation given back {time.monotonic() - began:.1f} s after the loss")


def test_second_node_of_two_frees_the_allocation_when_the_head_is_lost(losing: Cluster, tmp_path: Path) -> None:
    job = started_with_files(losing, tmp_path, "1:2", 2)

    losing.workers[0].lose()
    wait_until(lambda: job.facts()["JobState"] == "CANCELLED", 100, what=lambda: output_of(tmp_path, 1))

    assert "m1, which has the job's script, cannot be reached" in output_of(tmp_path, 1)
    # Slurm names the state before it ends the processes.
    wait_until(lambda: not list(job.processes()), 60, what=lambda: output_of(tmp_path, 1))


def has_given_up(folder: Path, node: int) -> bool:
    """Return whether the node has written that it cannot reach the head."""
    return "contact with the job was lost; gave up" in output_of(folder, node)


def output_of(folder: Path, node: int) -> str:
    """Return the output of a node that writes to a file of its own."""
    file = folder / f"node.{node}"
    return file.read_text() if file.exists() else ""


def test_a_job_ends_at_once_without_enough_nodes(losing: Cluster, tmp_path: Path) -> None:
    job = started(losing, tmp_path, "--rdzv-conf heartbeat_timeout=3 train.py", "--nodes=3")

    losing.workers[2].lose()
    job.wait_for_output("2 of at least 3 nodes are left", times=2)


def test_an_element_of_an_array_frees_its_nodes_while_another_one_trains(slurm: Cluster, tmp_path: Path) -> None:
    long = started(slurm, tmp_path, "train.py", "--array=0", "--nodes=2", "--nodelist=m1,m2")
    again = tmp_path / "short"
    again.mkdir()
    short = started(slurm, again, "train.py 1", "--array=1", "--nodes=2", "--nodelist=m1,m2")

    short.wait_for_output("status 0")
    began = time.monotonic()
    assert "COMPLETED" == short.ends()
    print(f"nodes freed {time.monotonic() - began:.1f} s after the end of the step")

    assert "RUNNING" == long.facts()["JobState"]
    long.cancel()
    long.ends()
