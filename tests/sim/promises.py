"""Promises of a job to its user under a plan of faults, beyond the invariants that always hold."""

from __future__ import annotations

from elasticlib.rendezvous.coordinator._places import PAUSES
from elasticlib.testing import (
    Cut,
    FailWorker,
    FaultPlan,
    Flap,
    Join,
    Kill,
    Leave,
    Pause,
    PauseStore,
    Slow,
    Suspend,
)
from tests.sim.simulator import AgentEnded, Rules, SimulatedCluster
from tests.sim.simulator.node import LADDER

ALL_THERE = 1.0
"""Seconds in which all agents of the beginning have come."""
DISTURBING = (Cut, Flap, Kill, Leave, Pause, Slow, Suspend)


def disturbed(plan: FaultPlan) -> frozenset[int]:
    """Nodes that may be taken for dead, or are."""
    return frozenset(fault.node for fault in plan if isinstance(fault, DISTURBING))


def must_succeed(cluster: SimulatedCluster) -> bool:
    """Return whether the job must succeed: enough undisturbed nodes and restarts remain."""
    plan, rules = cluster.plan, cluster.rules
    steady = frozenset(range(cluster.nodes)) - disturbed(plan)
    costly = sum(isinstance(fault, (FailWorker, Cut, Kill, Pause, Slow, Suspend)) for fault in plan)
    outages = sum(isinstance(fault, PauseStore) for fault in plan)
    if cluster.coordinator == "fixed" and (0 not in steady or any(isinstance(f, Join) and f.node == 0 for f in plan)):
        return False
    if cluster.coordinator == "elected" and outages:
        return False
    if cluster.coordinator != "fixed" and any(isinstance(f, (Flap, Leave)) and f.at < ALL_THERE for f in plan):
        return False  # it may be alone yet, and the last one that goes ends the job
    if rules.join_timeout == 0 and any(isinstance(fault, Flap) for fault in plan):
        return False  # it may go before the others have come, and then nobody is waited for
    return len(steady) >= rules.min_nodes and costly <= rules.max_restarts


def verdicts_of_steady_nodes(cluster: SimulatedCluster) -> list[AgentEnded | None]:
    """Return the outcome of the first agent of each undisturbed machine."""
    steady = frozenset(range(cluster.nodes)) - disturbed(cluster.plan)
    return [cluster.machines[number].nodes[0].outcome for number in sorted(steady)]


def kinds(cluster: SimulatedCluster) -> list[str]:
    """Return how each agent ended, in the order of their machines; "-" where there is no outcome."""
    members = sorted(cluster.members, key=lambda each: each.number)
    return [node.outcome.kind if node.outcome else "-" for node in members]


def admission_limit(rules: Rules) -> float:
    """Seconds after the last fault by which everybody is in: found, lost, stopped, waited for, after its pause."""
    to_find = 1.3 * rules.heartbeat + 8.0
    to_find += PAUSES[-1] * rules.heartbeat
    return to_find + LADDER + rules.join_limit + rules.last_call


def left_out(cluster: SimulatedCluster) -> list[str]:
    """Agents without ranks and without a reason for it."""
    state = cluster.state
    present = [node for node in cluster.members if node.agent.alive and node.outcome is None]
    if state is None or state.final is not None:
        return []
    current = state.round
    if current is None or current.end is not None:
        return [node.name for node in present]
    if current.succeeded or len(current.entries) == state.rules.max_nodes:
        return []
    return [node.name for node in present if node.name not in current.entries]
