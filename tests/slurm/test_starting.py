"""Steps of a real Slurm that end while one of their nodes is still starting, and the others wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

NODE = """\
#!/bin/bash
if [ $SLURM_PROCID = 1 ]; then
    echo node 1 starts
    exec sleep 600
fi
trap : TERM
elasticrun --nproc-per-node 1 train.py
echo node 0 ends with $?
"""
"""Node 1 reads its program from a slow disk: like an interpreter without handlers, it ends at the first signal."""


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Job:
    """A job whose first node waits for the second one."""
    (node := tmp_path / "node.sh").write_text(NODE)
    node.chmod(0o755)
    command = "trap : TERM\nsrun --wait=0 --kill-on-bad-exit=0 ./node.sh"
    started = slurm.start(tmp_path, "print('trained', flush=True)", command)
    started.wait_for_output("node 1 starts")
    started.wait_for_output("has waited 5 s for job")
    return started


@pytest.mark.parametrize("options", [(), ("--signal=TERM",)], ids=["cancelled", "notice"])
def test_the_waiting_node_ends_at_once_and_nothing_is_left(job: Job, options: tuple[str, ...]) -> None:
    job.cancel(*options)
    job.ends()

    assert "node 0 ends with" in job.output, job.output
    assert "trained" not in job.output, job.output
    wait_until(lambda: not list(job.processes()), what=lambda: f"the end of {list(job.processes())}")


def test_a_notice_before_the_start_is_a_preemption(job: Job) -> None:
    job.cancel("--signal=TERM")
    job.ends()

    assert "node 0 ends with 75" in job.output, job.output


def test_cancelled_step_does_not_count_as_preemption(job: Job) -> None:
    job.cancel()

    assert "CANCELLED" == job.ends()
    assert "node 0 ends with 1" in job.output, job.output
