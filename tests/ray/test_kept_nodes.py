"""Calls within ``with Ray(...)`` on a real Ray cluster: the agents stay, also past failures, and end with the block."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.launches import environment
from tests.ray._cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 120.0
STEPS = """
import os, time

VERSION = {version}

def parent(pid):
    with open(f"/proc/{{pid}}/stat") as file: return int(file.read().rsplit(")", 1)[1].split()[1])

def agent():
    pid = os.getpid()
    while "elasticlib.remote._node" not in open(f"/proc/{{pid}}/cmdline").read(): pid = parent(pid)
    return pid

def train(what):
    if what == "raise" and os.environ["RANK"] == "1": raise ValueError("bad batch")
    while what == "wait":
        open("up", "w").close()
        time.sleep(0.05)
    return agent(), VERSION
"""
CLIENT = """
import json, os, signal, sys, time
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray
from steps import train

def call(cluster, what):
    launch = elastic_launch(LaunchConfig(2, 3, shutdown_timeout=5), train, on=cluster)
    try:
        if what == "wait":
            job = launch.start(what)
            while not os.path.exists("up"): time.sleep(0.05)
            job.stop()
            job.result()
        return list(launch(what).values())
    except BaseException as error:
        return str(error).splitlines()[0]

with Ray(nodes=3) as cluster:
    for line in sys.stdin:
        what = line.strip()
        if what == "end": break
        if what == "shutdown": import ray; ray.shutdown()
        print("=", json.dumps(call(cluster, what)), flush=True)
print("= ended", flush=True)
sys.stdin.read()
"""


def write_steps(folder: Path, version: int) -> None:
    (folder / "steps.py").write_text(STEPS.format(version=version) + "#" * version)


@pytest.fixture
def client(ray_cluster: Cluster, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that makes calls within one block, each for a line that it gets."""
    (tmp_path / "client.py").write_text(CLIENT)
    write_steps(tmp_path, 1)
    with subprocess.Popen(
        [sys.executable, "client.py"],
        cwd=tmp_path,
        env=environment(RAY_ADDRESS=ray_cluster.address, RAY_USAGE_STATS_ENABLED="0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as found:
        yield found
        found.kill()


def answer(client: subprocess.Popen[str], line: str) -> str:
    """The line that the client writes for *line*."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{line}\n")
    client.stdin.flush()
    while not (reply := client.stdout.readline()).startswith("= "):
        assert reply, client.communicate(timeout=LIMIT)
    return reply[2:].strip()


def agents(client: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the agents of a call, with the versions of the module in their workers."""
    found = json.loads(answer(client, "work"))
    assert isinstance(found, list), found
    return dict(found)


@pytest.mark.timeout(300)
def test_agents_stay_and_lost_ones_are_replaced(
    ray_cluster: Cluster, client: subprocess.Popen[str], tmp_path: Path
) -> None:
    first = agents(client)
    assert first == agents(client)

    assert "rank 1: ValueError: bad batch" in answer(client, "raise")
    assert first == agents(client)

    assert "stopped by Job.stop()" in answer(client, "wait")
    assert first == agents(client)

    # The workers import the present file.
    write_steps(tmp_path, 2)
    assert dict.fromkeys(first, 2) == agents(client)

    killed = min(first)
    subprocess.run(["kill", "-9", str(killed)], check=True)
    after = agents(client)
    assert 3 == len(after)
    assert {*first} - {killed} == {*first} & {*after}

    assert "ended" == answer(client, "end")
    assert [] == ray_cluster.left(5.0)


def test_killed_driver_leaves_no_idle_agent(ray_cluster: Cluster, client: subprocess.Popen[str]) -> None:
    first = agents(client)

    # The end of the connection to Ray ends the agents, and the next call has others.
    answer(client, "shutdown")
    assert not {*first} & {*agents(client)}

    client.kill()
    client.wait(LIMIT)

    assert [] == ray_cluster.left(5.0)
