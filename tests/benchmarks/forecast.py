"""
Forecast for a schedule of faults, from the simulated cluster, which runs the real coordinator.

Rules of this file: no process, no clock; the same schedule and seed give the same forecast.
"""

from __future__ import annotations

import random
import signal

from attrs import frozen

from elasticlib.testing import Fault, FaultPlan
from tests.sim.simulator import Finalized, Rules, SimulatedCluster, Started

HEARTBEAT = 3.0
LAST_CALL = 1.0
JOIN_TIMEOUT = 20.0
AHEAD = 5.0
"""When the first fault of a schedule comes at the earliest; all agents of the start are in by then."""
_FOREVER = 1e4


@frozen
class Draft:
    """Parameters that are fixed before a schedule begins."""

    backend: str
    nodes: int
    min_nodes: int
    max_restarts: int
    steps: int
    stranger: bool = False
    """True if a stranger without the job's token uses its store."""

    @property
    def rules(self) -> Rules:
        """As the coordinator gets them."""
        return Rules(
            self.min_nodes,
            self.nodes,
            self.max_restarts,
            last_call=LAST_CALL,
            join_timeout=JOIN_TIMEOUT,
            heartbeat=HEARTBEAT,
        )


def draft(backend: str, draw: random.Random) -> Draft:
    """A random one."""
    nodes = draw.randint(3, 5)
    return Draft(backend, nodes, draw.randint(1, 2), draw.randint(1, 3), draw.randint(2, 4), draw.random() < 0.5)


@frozen
class Forecast:
    """End of a plan if nothing else happens."""

    world: int
    """Workers of the round that runs in the end; 0 when the job is over."""
    restarts: int
    present: tuple[int, ...]
    """Machines of the agents that are there in the end, in order."""
    settled: float
    """When the last workers start, in seconds from the job's start."""
    codes: tuple[tuple[int, int], ...]
    """Machine and exit code of all agents once the workers have ended, in order; SIGKILL is -9."""


def foretell(plan: Draft, faults: tuple[Fault, ...], seed: int) -> Forecast:
    """
    Return the forecast for *faults*: the simulated cluster, long after the last of them.

    Raises `InvariantBroken` if the simulation itself finds a fault.
    """
    cluster = SimulatedCluster(
        plan.rules,
        plan.nodes,
        FaultPlan(faults),
        coordinator="fixed" if plan.backend == "c10d" else "elected",
        seed=seed,
        work=_FOREVER,
        uneven=False,
    )
    cluster.run(until=AHEAD + cluster.plan.last + 2 * JOIN_TIMEOUT + 100.0)
    restarts = [record.restarts for record in cluster.history if isinstance(record, Finalized)][-1]
    present: list[int] = []
    codes: list[tuple[int, int]] = []
    for number, machine in cluster.machines.items():
        for node in machine.nodes:
            outcome = node.outcome
            if outcome is not None:
                codes.append((number, 0 if outcome.kind == "succeeded" else 1))
            elif node.agent.alive:
                present.append(number)
                codes.append((number, 0))
            else:
                codes.append((number, -signal.SIGKILL))
    settled = max(record.at for record in cluster.history if isinstance(record, Started))
    return Forecast(len(cluster.running), restarts, tuple(sorted(present)), settled, tuple(sorted(codes)))
