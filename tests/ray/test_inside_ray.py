"""Calls from a task of a Ray job, with a placement group of that job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launches import environment
from tests.ray._cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 180.0
DRIVER = """
import json, os
import ray
from ray.util.placement_group import placement_group
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray

def train():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

@ray.remote(num_cpus=0)
def tune():
    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    config = LaunchConfig(nproc_per_node="auto", max_restarts=0)
    first = elastic_launch(config, train, on=Ray(2, placement_group=group))()
    second = elastic_launch(config, train, on=Ray(2, placement_group=group))()
    kept = ray.util.placement_group_table(group)["state"]
    return [sorted(first.values()), sorted(second.values()), kept]

if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print("outcome", json.dumps(ray.get(tune.remote())))
"""


def test_a_task_calls_twice_with_a_group_of_its_own(ray_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env=environment(RAY_ADDRESS=ray_cluster.address, RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    found = [line.removeprefix("outcome ") for line in done.stdout.splitlines() if line.startswith("outcome ")]
    ranks = [[0, 2], [1, 2]]
    assert [[ranks, ranks, "CREATED"]] == [json.loads(each) for each in found], done.stdout + done.stderr
    assert [] == ray_cluster.left(10.0)
