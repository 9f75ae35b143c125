"""However many nodes a job has: what it writes is within the limits of stores, and costs each node the same."""

from __future__ import annotations

import functools

import pytest

from elasticlib.rendezvous.protocol._shortening import ENVELOPE
from elasticlib.testing import FailWorker, Fault, FaultPlan, Kill, Pause, Slow
from tests.benchmarks.cluster_size import (
    COORDINATORS,
    ETCD_TAKES,
    HEARTBEAT,
    LENGTH,
    TCPSTORE_TAKES,
    WORKERS,
    Row,
    measure,
)
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import Rules, SimulatedCluster

SMALL, LARGE = 8, 32
GROWTH = 1.25
"""By which a figure of a node may grow from the small job to the large one."""
pytestmark = pytest.mark.sampled(0.7)
BOTH = pytest.mark.parametrize("coordinator", COORDINATORS)


@functools.cache
def row(nodes: int, coordinator: str) -> Row:
    return measure(nodes, coordinator)


@BOTH
def test_operations_and_bytes_of_a_node_do_not_grow_with_more_nodes(coordinator: str) -> None:
    small, large = row(SMALL, coordinator), row(LARGE, coordinator)

    for phase, cost in large.costs.items():
        # A node that is lost is a larger part of a small job.
        others = [small.costs[phase], *([small.costs["after a failure"]] if phase == "after a loss" else [])]
        assert cost.operations <= GROWTH * max(other.operations for other in others), phase
        assert cost.bytes <= GROWTH * max(other.bytes for other in others), phase


@BOTH
def test_nothing_that_is_written_is_near_the_limits_of_stores(coordinator: str) -> None:
    large = row(LARGE, coordinator)

    assert large.envelope <= ENVELOPE
    assert large.value <= ENVELOPE
    assert max(large.value, large.document) < ETCD_TAKES / 10
    assert ENVELOPE < TCPSTORE_TAKES


def test_a_document_has_room_for_ten_thousand_nodes() -> None:
    small, large = row(SMALL, "elected"), row(LARGE, "elected")

    more = (large.document - small.document) / (LARGE - SMALL)
    assert large.document + 10_000 * more < 2 * ETCD_TAKES
    # As it lies in etcd; the names of real hosts and their addresses are longer, and alike.
    assert large.packed + 10_000 * (large.packed - small.packed) / (LARGE - SMALL) < ETCD_TAKES


@BOTH
def test_outcome_of_large_failures_takes_no_longer_with_more_nodes(coordinator: str) -> None:
    for nodes in (SMALL, LARGE):
        assert row(nodes, coordinator).seconds["end"] < 1.0


FAILURES = [FailWorker(node, 5.0, workers=WORKERS, text=LENGTH) for node in range(6)]


def failing(*faults: Fault, coordinator: str = "elected") -> SimulatedCluster:
    """All workers of all nodes fail, and something else happens."""
    rules = Rules(6, 6, 0, heartbeat=HEARTBEAT)
    return CheckedCluster(rules, 6, FaultPlan([*FAILURES, *faults]), coordinator, uneven=False).run()


def received_causes(cluster: SimulatedCluster) -> list[tuple[str, int]]:
    """For each node that was told how the job ended: whose failure it was, and characters of its traceback."""
    finals = [node.member.session.final for node in cluster.members]
    return [(final.root_node or "", len(final.root.traceback)) for final in finals if final and final.root]


@BOTH
def test_every_node_gets_the_whole_root_cause(coordinator: str) -> None:
    found = received_causes(failing(coordinator=coordinator))

    assert len(found) == 6
    assert len(set(found)) == 1
    assert found[0][1] == LENGTH


@pytest.mark.parametrize("delay", [0.002, 0.005, 0.008, 0.011, 0.014, 0.02, 0.03, 0.2])
def test_successor_amid_the_outcome_sends_the_same_outcome_to_all(delay: float) -> None:
    found = received_causes(failing(Kill(0, 5.0 + delay)))

    others = [each for each in found if each[0].partition("/")[0] != "n0"]
    assert len(found) >= 5
    assert len(set(found)) == 1
    assert all(length == LENGTH for _, length in others)


@BOTH
@pytest.mark.parametrize("delay", [0.003, 0.005, 0.007, 0.009])
def test_the_outcome_waits_for_no_node_that_is_lost_with_the_root_cause(coordinator: str, delay: float) -> None:
    earlier = FailWorker(3, 4.99, workers=WORKERS, text=LENGTH)
    cluster = failing(earlier, Kill(3, 4.99 + delay), coordinator=coordinator)

    found = {(root.partition("/")[0], 1000 < length < LENGTH) for root, length in received_causes(cluster)}
    assert found == {("n3", True)}  # as far as it had come
    assert max(outcome.at for outcome in cluster.outcomes.values()) < 5.0 + HEARTBEAT + 5.0


@BOTH
@pytest.mark.parametrize("fault", [Slow(3, 5.0, 3.0, 0.5), Pause(3, 5.01, 4.0)])
def test_a_slow_node_that_has_the_root_cause_is_waited_for(coordinator: str, fault: Fault) -> None:
    found = received_causes(failing(FailWorker(3, 4.99, workers=WORKERS, text=LENGTH), fault, coordinator=coordinator))

    assert {length for _, length in found} == {LENGTH}
