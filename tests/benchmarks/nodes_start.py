"""Promise 3, of several nodes: from the commands to the last worker, each node a machine with one worker."""

from __future__ import annotations

import functools
import time

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import machines, missing
from tests.hosts._team import HungError, dynamic, team


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


def _of(nodes: int, *goals: Goal) -> Benchmark:
    return Benchmark(
        f"start of {nodes} nodes",
        functools.partial(measure, nodes=nodes),
        (Figure(3, f"commands of {nodes} nodes to the last worker", "s", "last_worker", goals),),
    )


NODES_START = (_of(2, Goal(0.35, Of.RATIO)), _of(3))
