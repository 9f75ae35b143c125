"""
Calls on a Ray cluster of three nodes: to the first line, and from a loss to the next step.

``python -m tests.benchmarks.ray_recovery``, as root, in an environment with Ray (``pip install -e '.[ray]'``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.process.launches import environment
from tests.ray._cluster import Cluster, cluster
from tests.waiting import wait_until

LIMIT = 180.0
MOMENTS = (0.0, 1.0, 2.5, 5.0)
"""Seconds from a group's first step to the death of a worker."""
CLIENT = """
import os, sys, time
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray

def train(folder, runs):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    while True:
        dist.barrier()
        with open(f"{folder}/new.{rank}", "w") as file: file.write(f"{os.getpid()} {world} {time.time()}")
        os.replace(f"{folder}/new.{rank}", f"{folder}/step.{rank}")
        if not runs: return
        time.sleep(0.05)

if __name__ == "__main__":
    folder, calls, runs = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "runs"
    engine = Ray(nodes=3)
    for _ in range(calls):
        began = time.time()
        elastic_launch(LaunchConfig(2, 3, max_restarts=9), train, on=engine)(folder, runs)
        print("call", began, time.time(), open(f"{folder}/step.0").read().split()[2], flush=True)
"""


def _client(found: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "client.py").write_text(CLIENT)
    variables = environment(RAY_ADDRESS=found.address, RAY_USAGE_STATS_ENABLED="0")
    line = [sys.executable, "client.py", str(folder), *arguments]
    return subprocess.Popen(line, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)


def _steps(folder: Path, world: int) -> dict[int, float]:
    """The last step of each worker of a group of *world*, by pid."""
    found = {}
    for path in (folder / f"step.{rank}" for rank in range(world)):
        pid, of, at = path.read_text().split() if path.exists() else ("0", "0", "0")
        if of == str(world):
            found[int(pid)] = float(at)
    return found


def _seconds_to_group(folder: Path, world: int, act: Callable[[], object]) -> float:
    """Seconds from *act* to the first common step of a new group of *world* workers."""
    former = set(_steps(folder, 2)) | set(_steps(folder, 3))
    began = time.time()
    act()
    wait_until(lambda: len(set(_steps(folder, world)) - former) == world, LIMIT, "the next group")
    return time.time() - began


def _calls(found: Cluster, folder: Path) -> None:
    stdout, _ = _client(found, folder, "2", "once").communicate(timeout=LIMIT)
    for name, line in zip(("first", "second"), stdout.splitlines(), strict=True):
        began, ended, stepped = map(float, line.split()[1:])
        print(
            f"{name} call to its first step: {stepped - began:.2f} s, to its result: {ended - began:.2f} s", flush=True
        )


def _losses(found: Cluster, folder: Path) -> None:
    client = _client(found, folder, "1", "runs")
    wait_until(lambda: len(_steps(folder, 3)) == 3, LIMIT, "the first group")
    for moment in MOMENTS:
        time.sleep(moment)
        victim = min(_steps(folder, 3))
        seconds = _seconds_to_group(folder, 3, lambda victim=victim: os.kill(victim, signal.SIGKILL))  # type: ignore[misc]
        print(f"worker killed {moment:g} s after the first step, to the next step: {seconds:.2f} s", flush=True)

    seconds = _seconds_to_group(folder, 2, lambda: found.remove("n2"))
    print(f"node lost, to the next step of two nodes: {seconds:.2f} s", flush=True)
    seconds = _seconds_to_group(folder, 3, lambda: found.add("n2"))
    print(f"node added, to the next step of three nodes: {seconds:.2f} s", flush=True)

    began = time.time()
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=LIMIT)
    print(f"interrupt to the end of the call: {time.time() - began:.2f} s; left: {found.left(5.0)}", flush=True)


def main() -> None:
    """Print all figures."""
    with cluster("n1", "n2", "n3") as found, tempfile.TemporaryDirectory(prefix="eb-") as folder:
        print(f"load of the machine: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} CPUs", flush=True)
        for act in (_calls, _losses):
            place = Path(folder, act.__name__)
            place.mkdir()
            act(found, place)
        print(f"load of the machine: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
