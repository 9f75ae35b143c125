"""
A real Ray cluster on this machine: a head without CPUs, and nodes with one CPU each.

Rules of this file: a program of its own holds the cluster (``ray.cluster_utils.Cluster``), so that no part of Ray is in
the process of the tests. It ends the cluster at the end of its input. All processes of the cluster have the folder in
their environment, as those of a job (`tests.benchmarks.tree`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import define

from tests.benchmarks import tree
from tests.benchmarks.job import environment

LIMIT = 120.0
TRIES = 3
"""Ray itself ends a node whose helpers are not up within 15 s, as on a busy machine: then the cluster starts again."""
_PROGRAM = """
import sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

def drain(node):
    reason, deadline = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), int(time.time() + 600) * 1000
    return GcsClient(address=cluster.address).drain_node(node.node_id, reason, "the machine is reclaimed", deadline)

settings = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
head = {**settings, "num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = {name: cluster.add_node(**settings) for name in sys.argv[1:]}
print(cluster.address, flush=True)
for line in sys.stdin:
    action, name = line.split()
    if action == "add":
        nodes[name] = cluster.add_node(**settings)
    elif action == "drain":
        assert drain(nodes[name])[0]
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print(name, flush=True)
cluster.shutdown()
"""
_OF_RAY = ("/site-packages/ray/", "ray::", "raylet")


def missing() -> str:
    """Why there can be no Ray here; empty when there can."""
    return "" if importlib.util.find_spec("ray") else "the package ray is not installed"


@define(eq=False)
class Cluster:
    """Ray, and the program that holds it."""

    folder: Path
    address: str
    _process: subprocess.Popen[str]

    def add(self, name: str) -> None:
        """Add a node."""
        _ask(self._process, f"add {name}")

    def remove(self, name: str) -> None:
        """Kill a node's raylet, as the loss of a machine does."""
        _ask(self._process, f"remove {name}")

    def drain(self, name: str) -> None:
        """Announce the end of a node, as an autoscaler does before it takes a machine away."""
        _ask(self._process, f"drain {name}")

    def left(self, seconds: float) -> list[str]:
        """Command lines of processes of jobs that are alive after *seconds*."""
        deadline = time.monotonic() + seconds
        while (found := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _alive(self) -> list[str]:
        processes = tree.table()
        pids = tree.descendants(tree.marked(self.folder, processes), processes) - {self._process.pid}
        commands = [tree.command(pid) for pid in pids]
        return sorted(each for each in commands if each and not any(part in each for part in _OF_RAY))


def _ask(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert _answer(process), f"the cluster ended with {process.wait(LIMIT)}: see its output"


def _answer(process: subprocess.Popen[str]) -> str:
    """Return the next line of the cluster's program; "" at its end."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def cluster(*names: str) -> Iterator[Cluster]:
    """A cluster with nodes *names*."""
    for attempt in range(TRIES):
        with ExitStack() as stack:
            # Ray's sockets are in this folder (TMPDIR), and their paths must be short.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eray-", ignore_cleanup_errors=True)))
            log = folder / "cluster.log"
            process = stack.enter_context(_program(folder, log, names))
            stack.callback(process.communicate, timeout=LIMIT)
            if address := _answer(process):
                yield Cluster(folder, address, process)
                return
            assert attempt + 1 < TRIES, log.read_text(errors="replace")[-3000:]


def _program(folder: Path, log: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    # A busy machine starts a node in more than Ray's 30 s.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "60", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *names],
            env=environment(folder, own),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
