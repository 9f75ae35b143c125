"""A server outside the allocation: a step goes on without the node that would have hosted its store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

PORT = 29400
TRAIN = """
import os, time
print("node", os.environ["SLURM_PROCID"], "of", os.environ["GROUP_WORLD_SIZE"], "\\n", end="", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
print("done", os.environ["TORCHELASTIC_RESTART_COUNT"], "\\n", end="", flush=True)
"""
SCRIPT = """\
#!/bin/bash
srun --no-kill --wait=0 --kill-on-bad-exit=0 elasticrun --nnodes 2:3 --preload "" \
    --rdzv-backend c10d --rdzv-endpoint {address} --rdzv-id $SLURM_JOB_ID --rdzv-conf heartbeat_timeout=4 train.py
"""


@pytest.fixture
def server(slurm: Cluster) -> Iterator[str]:
    """The address of a server on the machine of slurmctld."""
    command = ("elasticrun", "serve", "--host", slurm.head.address, "--port", str(PORT))
    with slurm.head.popen(command, env=slurm.environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"elasticrun serve: at ")
        yield f"{slurm.head.address}:{PORT}"
        process.terminate()
        assert 0 == process.wait()


def test_step_continues_without_its_first_node(slurm: Cluster, server: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (script := tmp_path / "job.sh").write_text(SCRIPT.format(address=server))
    job = slurm.submit(script, "--nodes=3", "--ntasks-per-node=1", "--no-kill", "--exclusive")
    job.wait_for_output(" of 3", times=3)

    # The batch script has a task number, too, and no step.
    for pid in job.processes(SLURM_PROCID="0", SLURM_STEP_ID="0"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    job.wait_for_output(" of 2", times=2)
    (tmp_path / "go").touch()
    job.wait_for_output("done 0", times=2)
    wait_until(job.is_over, what=lambda: job.output)
