"""
Promise 15: several nodes, from the commands to the last worker, and the memory of one of them.

Of workers that import nothing each node is a machine of its own with one worker; of workers that import torch there are
two nodes on this machine, with eight workers each.
"""

from __future__ import annotations

import functools
import time

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import BenchmarkError, launched, started
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import machines, missing
from tests.hosts._team import HungError, dynamic, team
from tests.process.launches import free_port

WORKERS = 8


@frozen
class NodesStart:
    """Seconds from the first command."""

    last_worker: float


def measure(launcher: Launcher, turn: Turn, nodes: int) -> NodesStart:
    """Start a job once."""
    if why := missing():
        raise BenchmarkError(why)
    with machines(nodes) as hosts, team(*dynamic("c10d", hosts[0], f"{nodes}:{nodes}"), launcher=launcher) as job:
        began = time.monotonic()
        for host in hosts:
            job.start(host)
        try:
            job.wait_for(lambda: len([line for line in job.lines() if line.what == "up"]) == nodes, "workers at work")
        except HungError as error:
            raise BenchmarkError(str(error)) from error
        return NodesStart(max(line.at for line in job.lines() if line.what == "up") - began)


def _of(nodes: int) -> Benchmark:
    return Benchmark(
        f"start of {nodes} nodes",
        functools.partial(measure, nodes=nodes),
        (Figure(15, f"commands of {nodes} nodes to the last of {nodes} workers, no torch", "s", "last_worker"),),
    )


@frozen
class TwoNodes:
    """Seconds from the first command to the last worker past its imports, and MiB of the larger node (PSS)."""

    last_worker: float
    memory: float


def measure_torch(launcher: Launcher, turn: Turn) -> TwoNodes:
    """Start two nodes whose workers import torch. Raises `BenchmarkError` when they do not succeed."""
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=nodes", "--nnodes=2"]
    command = launched(launcher, "life.py", workers=WORKERS, options=where)
    with started(command) as first, started(command) as second:
        up = [max(job.when("up", WORKERS).values()) for job in (first, second)]
        memory = max(tree.pss(tree.of_job(job.process.pid, job.folder)) for job in (first, second))
        with first.opened(), second.opened():
            for job in (first, second):
                job.succeeded()
        return TwoNodes(max(up) - first.started, memory / 2**20)


WITH_TORCH = Benchmark(
    "start of 2 nodes that import torch",
    measure_torch,
    (
        Figure(
            15,
            "2 nodes: commands to last of 16 workers past `import torch`",
            "s",
            "last_worker",
            (Goal(0.35, Of.RATIO),),
        ),
        Figure(15, "memory: a node of 8 workers that imported torch, PSS", "MiB", "memory", (Goal(0.27, Of.RATIO),)),
    ),
)
NODES_START = (WITH_TORCH, _of(2), _of(3))
