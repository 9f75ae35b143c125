"""Calls of `elastic_launch` on the nodes of a real Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.launches import environment
from tests.ray._cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 120.0
CLIENT = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray

class Point:
    def __init__(self, rank): self.rank = rank

def train(what, folder):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(f"{folder}/up.{rank}.new", "w") as file: file.write(f"{os.getpid()} {world}")
    os.replace(f"{folder}/up.{rank}.new", f"{folder}/up.{rank}")
    if what == "raise" and rank == 2: raise ValueError("bad batch")
    while what == "wait": time.sleep(0.05)
    print(f"rank {rank} works")
    return Point(rank), world, os.environ.get("OMP_NUM_THREADS")

if __name__ == "__main__":
    folder, *calls = sys.argv[1:]
    engine = Ray(nodes=3)
    for what in calls:
        config = LaunchConfig(2, 3, max_restarts=3 if what == "wait" else 0)
        try:
            results = elastic_launch(config, train, on=engine)(what, folder)
        except Exception as error:
            print(json.dumps([[each.__name__ for each in type(error).__mro__], str(error).splitlines()[0]]))
        else:
            print(json.dumps({rank: [value[0].rank, *value[1:]] for rank, value in results.items()}))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(ray_cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Start a client that makes *calls*, in a folder of its own."""
    (tmp_path / "client.py").write_text(CLIENT)
    clients: list[subprocess.Popen[str]] = []

    def begin(*calls: str) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "client.py", str(tmp_path), *calls],
            cwd=tmp_path,
            env=environment(RAY_ADDRESS=ray_cluster.address, RAY_USAGE_STATS_ENABLED="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        clients.append(client)
        return client

    yield begin
    for client in clients:
        client.kill()
        client.communicate()


def lines_of(client: subprocess.Popen[str]) -> list[str]:
    """The output of a client that has ended, with its errors in the message of a failure."""
    stdout, stderr = client.communicate(timeout=LIMIT)
    assert client.returncode == 0, stdout + stderr
    return stdout.splitlines()


def wait_for_world(client: subprocess.Popen[str], folder: Path, world: int, former: set[str]) -> set[str]:
    """Wait until all ranks of a group of *world* workers have begun, none of them in *former*; return their pids."""
    group: list[list[str]] = []

    def have_begun() -> bool:
        paths = [folder / f"up.{rank}" for rank in range(world)]
        group[:] = [path.read_text().split() for path in paths if path.exists()]
        return (
            client.poll() is not None
            or len([1 for pid, of in group if of == str(world) and pid not in former]) == world
        )

    wait_until(have_begun, LIMIT, lambda: f"a group of {world} workers, instead of {group}")
    assert client.poll() is None, client.communicate()
    return {pid for pid, _ in group}


def test_calls_return_all_results_or_raise_the_error_of_a_worker(ray_cluster: Cluster, start: Start) -> None:
    lines = lines_of(start("work", "raise", "work"))
    results = [json.loads(line) for line in lines if line.startswith(("{", "[["))]

    # Ray would set OMP_NUM_THREADS by the actor's CPUs.
    expected = {str(rank): [rank, 3, "1"] for rank in range(3)}
    assert [expected, expected] == [results[0], results[2]]
    assert {"ChildFailedError", "ValueError"} <= set(results[1][0])
    assert results[1][1].startswith("rank 2: ValueError: bad batch (client.py:")
    assert {f"[{rank}] rank {rank} works" for rank in range(3)} == {line for line in lines if line.endswith("works")}
    assert [] == ray_cluster.left(5.0)


def test_lost_worker_and_node_are_replaced_and_nothing_is_left(
    ray_cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    client = start("wait")
    first = wait_for_world(client, tmp_path, 3, set())

    os.kill(int(min(first)), signal.SIGKILL)
    second = wait_for_world(client, tmp_path, 3, first)

    ray_cluster.remove("n2")
    third = wait_for_world(client, tmp_path, 2, first | second)

    ray_cluster.add("n2")
    wait_for_world(client, tmp_path, 3, first | second | third)

    client.kill()
    client.communicate(timeout=LIMIT)
    assert [] == ray_cluster.left(5.0)


def test_interrupted_driver_leaves_nothing(ray_cluster: Cluster, start: Start, tmp_path: Path) -> None:
    client = start("wait")
    wait_for_world(client, tmp_path, 3, set())

    client.send_signal(signal.SIGINT)
    client.communicate(timeout=LIMIT)

    assert [] == ray_cluster.left(5.0)
