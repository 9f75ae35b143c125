"""The example that the page *Ray* links: the digits on three nodes, with a worker that is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launches import environment
from tests.ray._cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "ray_digits.py"
LIMIT = 200.0


def run(cluster: Cluster, folder: Path, fail_rank: int) -> tuple[str, str]:
    """Return the output of the example, and the accuracy in it."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--checkpoint-dir", folder, "--fail-rank", str(fail_rank)],
        env=environment(RAY_ADDRESS=cluster.address, RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"test accuracy ([01]\.\d+) after 8 epochs \(world size 3\)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return done.stdout, found[1]


@pytest.mark.timeout(600)
def test_killed_worker_costs_no_accuracy(ray_cluster: Cluster, tmp_path: Path) -> None:
    printed, accuracy = run(ray_cluster, tmp_path / "killed", 1)
    assert "resumed from epoch 2" in printed
    assert float(accuracy) >= 0.95

    unharmed, same_accuracy = run(ray_cluster, tmp_path / "unharmed", -1)
    assert "resumed" not in unharmed
    assert accuracy == same_accuracy
    assert [] == ray_cluster.left(5.0)
