"""Promise 10: a lost node is noticed. One of two agents, each on a machine of its own, dies in one of three ways."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import machines, missing
from tests.hosts._team import Agent, HungError, Team, dynamic, team

LIMIT = 30.0
"""Seconds after which the survivor counts as left alone: the value is then this one."""
HEARTBEAT = 10.0
"""Seconds of time without a heartbeat after which a node counts as lost, when nobody says otherwise."""


@frozen
class Losses:
    """Seconds from the loss to the survivor's worker at work in a world of one; `LIMIT` when it never came."""

    killed: float
    """The agent was killed, as the kernel does when memory runs out: its connections end."""
    emptied: float
    """All of its processes were killed at once, as those of a container: its machine still answers."""
    silent: float
    """Its link was cut: nothing tells of it but silence."""


def _lose(launcher: Launcher, take_away: Callable[[Agent], None]) -> float:
    if why := missing():
        raise BenchmarkError(why)
    with machines(2) as hosts, team(*dynamic("c10d", hosts[0], "1:2"), "--max-restarts=3", launcher=launcher) as job:
        _, lost = job.start(hosts[0]), job.start(hosts[1])
        try:
            job.wait_for(lambda: _up(job, world=2) == 2, "two workers at work")
        except HungError as error:
            raise BenchmarkError(str(error)) from error
        before = time.monotonic()
        take_away(lost)
        try:
            job.wait_for(lambda: _up(job, world=1), "the survivor", LIMIT)
        except HungError:
            return LIMIT
        return max(line.at for line in job.lines() if line.what == "up" and line.world == 1) - before


def _kill_all(agent: Agent) -> None:
    tree.kill(agent.family())


def _cut(agent: Agent) -> None:
    agent.host.cut()


def _up(job: Team, world: int) -> int:
    return sum(line.what == "up" and line.world == world for line in job.lines())


def measure(launcher: Launcher, turn: Turn) -> Losses:
    """Lose a node in each way."""
    return Losses(_lose(launcher, Agent.kill), _lose(launcher, _kill_all), _lose(launcher, _cut))


LOST_NODE = Benchmark(
    "lost node",
    measure,
    (
        Figure(10, f"agent killed to survivor re-formed ({LIMIT:g}: not noticed)", "s", "killed", (Goal(3.0),)),
        Figure(10, f"all processes killed to survivor re-formed ({LIMIT:g})", "s", "emptied", (Goal(3.0),)),
        Figure(
            10,
            f"link cut to survivor re-formed ({LIMIT:g}: not noticed)",
            "s",
            "silent",
            (Goal(HEARTBEAT + 1),),
        ),
    ),
)
