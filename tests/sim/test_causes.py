"""A restart has the cause that it has, in whatever order its consequences are heard; and a death alone costs none."""

from __future__ import annotations

import re

import pytest
from attrs import evolve
from hypothesis import given, settings, strategies as st

from elasticlib.testing import FailWorker, Fault, FaultPlan, Join, Kill, Leave, Pause, Slow, Stubborn
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import Finalized, Rules, SimulatedCluster

pytestmark = pytest.mark.sampled(1.0)

BOTH = pytest.mark.parametrize("coordinator", ["fixed", "elected"])
RULES = Rules(2, 4, 1, last_call=2.0, heartbeat=10.0)
NODES = 4
FEWER = settings.default.max_examples // 3 if settings.default else 50


SLOW = tuple(Stubborn(node, at=0.0, seconds=0.11) for node in range(NODES))
"""Workers take a while to stop, so that all that one death causes happens in its round."""


def run(*faults: Fault, rules: Rules = RULES, coordinator: str = "fixed", seed: int = 0) -> SimulatedCluster:
    return CheckedCluster(rules, NODES, FaultPlan((*SLOW, *faults)), coordinator, seed, 60.0).run()


def second_round(cluster: SimulatedCluster) -> Finalized:
    _, second = [record for record in cluster.history if isinstance(record, Finalized)]
    return second


def ends(cluster: SimulatedCluster) -> set[str]:
    return {outcome.kind for outcome in cluster.outcomes.values()}


milliseconds = st.integers(-50, 50).map(lambda number: number / 1000)
elsewhere = st.lists(
    st.tuples(st.sampled_from([0, 2, 3]), milliseconds), min_size=1, max_size=3, unique_by=lambda it: it[0]
)


@settings(max_examples=FEWER)
@given(peers=elsewhere, seed=st.integers(0, 9), coordinator=st.sampled_from(["fixed", "elected"]))
def test_the_cause_is_the_failure_that_cut_the_connections_of_its_peers(
    peers: list[tuple[int, float]], seed: int, coordinator: str
) -> None:
    cut = (FailWorker(node, at=5.0 + offset, secondary=True) for node, offset in peers)
    cluster = run(FailWorker(1, at=5.0), *cut, coordinator=coordinator, seed=seed)

    second = second_round(cluster)
    assert "on node n1 " in second.cause
    assert "restart 1 of 1" in second.cause
    assert (1, {"succeeded"}) == (second.restarts, ends(cluster))


DEATHS = [
    Kill(1, at=5.0),
    Kill(1, at=5.0, what="agent"),
    Leave(1, at=5.0),
    Pause(1, at=5.0, seconds=25.0),
]


@settings(max_examples=FEWER)
@given(
    death=st.sampled_from(DEATHS),
    peers=elsewhere,
    left=st.integers(0, 1),
    seed=st.integers(0, 9),
    coordinator=st.sampled_from(["fixed", "elected"]),
)
def test_lost_node_uses_no_restart_whatever_its_peers_report(
    death: Fault, peers: list[tuple[int, float]], left: int, seed: int, coordinator: str
) -> None:
    """Nor ends it the job where none is left."""
    cut = (FailWorker(node, at=5.0 + offset, secondary=True) for node, offset in peers)
    rules = evolve(RULES, max_restarts=left)
    cluster = run(death, *cut, rules=rules, coordinator=coordinator, seed=seed)

    assert {0} == {record.restarts for record in cluster.history if isinstance(record, Finalized)}
    assert ends(cluster) <= {"succeeded", "left"}


@BOTH
def test_host_lost_repeatedly_spends_restarts_though_peers_speak_first(coordinator: str) -> None:
    rules = Rules(2, 4, 9, last_call=2.0, heartbeat=10.0)
    faults: list[Fault] = []
    for number in range(4):
        at = 5.0 + 30.0 * number
        faults += [FailWorker(0, at=at, secondary=True), Kill(1, at=at, what="agent"), Join(1, at=at + 5.0)]
    cluster = CheckedCluster(rules, NODES, FaultPlan(faults), coordinator, 0, 200.0).run()

    assert cluster.state is not None
    assert 2 == cluster.state.restarts
    assert {"succeeded"} == ends(cluster)


@BOTH
def test_a_failure_of_its_own_is_the_cause_though_a_machine_dies_beside_it(coordinator: str) -> None:
    cluster = run(
        FailWorker(0, at=5.0), FailWorker(2, at=5.001, secondary=True), Kill(1, at=5.01), coordinator=coordinator
    )

    second = second_round(cluster)
    assert ("on node n0 " in second.cause, 1) == (True, second.restarts)


@BOTH
def test_store_lost_by_a_node_that_is_done_is_the_cause_of_later_failures(coordinator: str) -> None:
    late = Slow(1, at=0.05, seconds=3.0, delay=0.9)
    cluster = run(late, FailWorker(0, at=61.0), FailWorker(1, at=61.001, secondary=True), coordinator=coordinator)

    assert re.search(r"n0/\S+ failed in round 0 on node n0; restart 1 of 1", second_round(cluster).cause)
    assert {"succeeded"} == ends(cluster)


@BOTH
def test_a_store_lost_after_all_are_done_costs_nothing(coordinator: str) -> None:
    cluster = run(FailWorker(0, at=63.0), coordinator=coordinator)

    (only,) = [record for record in cluster.history if isinstance(record, Finalized)]
    assert (0, {"succeeded"}) == (only.restarts, ends(cluster))
