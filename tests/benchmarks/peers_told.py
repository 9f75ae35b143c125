"""Promise 11: peers are told. A worker on one machine dies; when have all workers on the others been stopped?"""

from __future__ import annotations

import os
import signal
import time

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import machines, missing
from tests.hosts._team import HungError, Team, dynamic, team

NODES = 3
LIMIT = 30.0
"""Seconds after which peers count as not told: the value is then this one."""


@frozen
class Reaction:
    """Seconds from a worker's SIGKILL; `LIMIT` for what never came."""

    stopped: float
    """To the last worker of the other nodes that was told to stop."""
    again: float
    """To the last new worker at work."""


def measure(launcher: Launcher, turn: Turn) -> Reaction:
    """Kill a worker, of another node each turn."""
    if why := missing():
        raise BenchmarkError(why)
    with machines(NODES) as hosts:
        options = dynamic("c10d", hosts[0], f"{NODES}:{NODES}")
        with team(*options, "--max-restarts=3", launcher=launcher) as job:
            for host in hosts:
                job.start(host)
            try:
                job.wait_for(lambda: len(_times(job, "up")) == NODES, "all workers at work")
            except HungError as error:
                raise BenchmarkError(str(error)) from error
            victim = next(line for line in job.lines() if line.host == hosts[turn.number % NODES].name)
            before = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            stopped = _last(job, "told", NODES - 1) - before
            return Reaction(min(stopped, LIMIT), min(_last(job, "up", 2 * NODES) - before, LIMIT))


def _times(job: Team, what: str) -> list[float]:
    return [line.at for line in job.lines() if line.what == what]


def _last(job: Team, what: str, count: int) -> float:
    """When the *count*-th such line was written; infinity if it never was."""
    try:
        job.wait_for(lambda: len(_times(job, what)) >= count, what, LIMIT)
    except HungError:
        return float("inf")
    return sorted(_times(job, what))[count - 1]


PEERS_STOPPED = Benchmark(
    "peers told",
    measure,
    (
        Figure(
            11,
            f"worker's death to workers of {NODES - 1} other nodes stopped ({LIMIT:g}: never)",
            "s",
            "stopped",
            (Goal(0.3),),
        ),
        Figure(11, f"the same, to all workers at work again ({LIMIT:g}: never)", "s", "again"),
    ),
)
