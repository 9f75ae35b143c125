"""A node that Ray drains leaves the job before its end, and the others go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launches import environment
from tests.ray._cluster import Cluster
from tests.ray.test_ray_engine import LIMIT, wait_for_world

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

CLIENT = """
import os, sys, time
import elasticlib
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray

def train(folder):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with open(f"{folder}/up.{rank}.new", "w") as file: file.write(f"{os.getpid()} {world}")
    os.replace(f"{folder}/up.{rank}.new", f"{folder}/up.{rank}")
    while not (stop := elasticlib.should_stop()):
        dist.barrier()
        time.sleep(0.05)
    with open(f"{folder}/stopped.{world}.{rank}", "w") as file: file.write(str(stop))

if __name__ == "__main__":
    elastic_launch(LaunchConfig(2, 3, max_restarts=0), train, on=Ray(nodes=3))(sys.argv[1])
"""


@pytest.mark.timeout(400)
def test_draining_node_leaves_without_budget(ray_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    with subprocess.Popen(
        [sys.executable, "client.py", str(tmp_path)],
        cwd=tmp_path,
        env=environment(RAY_ADDRESS=ray_cluster.address, RAY_USAGE_STATS_ENABLED="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            first = wait_for_world(client, tmp_path, 3, set())

            ray_cluster.drain("n2")
            second = wait_for_world(client, tmp_path, 2, first)
            stops = {path.name: path.read_text() for path in tmp_path.glob("stopped.3.*")}
            assert {f"stopped.3.{rank}" for rank in range(3)} == {*stops}
            assert 1 <= sum("Ray drains the node" in text for text in stops.values()), stops

            # The machine is gone, and another one is there.
            ray_cluster.remove("n2")
            ray_cluster.add("n2")
            wait_for_world(client, tmp_path, 3, first | second)
        finally:
            client.kill()
            print(*client.communicate(timeout=LIMIT))
    assert [] == ray_cluster.left(5.0)
