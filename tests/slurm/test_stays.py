"""Agents of a real Slurm's step that have ended: they stay until the others have, so that Slurm cuts no save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

SAVE = """
import os, sys, time, torch, torch.distributed as dist, elasticlib
dist.init_process_group("gloo")
for step in range(1_000_000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
    if step == 3:
        print("trains\\n", end="", flush=True)
    if elasticlib.should_stop():
        time.sleep(3 if os.environ["RANK"] == sys.argv[1] else 0)
        print("saved\\n", end="", flush=True)
        break
"""
"""The rank that is given saves for long."""

TRAIN = """
import time
print("trains\\n", end="", flush=True)
time.sleep(5)
print("trained\\n", end="", flush=True)
"""


@pytest.mark.parametrize("slow", [0, 1], ids=["host", "other"])
def test_a_node_that_has_saved_stays_until_the_others_have(slurm: Cluster, tmp_path: Path, slow: int) -> None:
    job = slurm.start(tmp_path, SAVE, f"srun --kill-on-bad-exit=1 elasticrun --nproc-per-node 1 train.py {slow}")
    job.wait_for_output("trains", times=2)

    job.cancel("--signal=TERM")
    job.wait_for_output("status")

    assert 2 == job.output.count("saved"), job.output
    assert "status 75" in job.output
    job.ends()


def test_a_node_that_is_refused_stays_until_the_job_ends(slurm: Cluster, tmp_path: Path) -> None:
    node = "bash -c 'exec elasticrun --nproc-per-node 1 --wait-for min --nnodes 1:$((2 + SLURM_PROCID)) train.py'"
    job = slurm.start(tmp_path, TRAIN, f"srun --wait=1 {node}")

    job.wait_for_output("status")

    assert "cannot join the job" in job.output and "stays until job" in job.output
    assert "trained" in job.output, job.output
    job.ends()
