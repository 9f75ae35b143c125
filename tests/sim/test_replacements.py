"""A machine that dies and is started again at once, where each node has a place of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from elasticlib.testing import Fault, FaultPlan, Join, Kill
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import Finalized, Rules, SimulatedCluster

pytestmark = pytest.mark.sampled(1.0)

RULES = Rules(3, 3, 1, heartbeat=10.0, fixed_places=True)
FEWER = settings.default.max_examples // 10 if settings.default else 5


def run(*faults: Fault, coordinator: str = "fixed", seed: int = 0) -> SimulatedCluster:
    return CheckedCluster(RULES, 3, FaultPlan(faults), coordinator, seed, 60.0).run()


@settings(max_examples=FEWER)
@given(after=st.floats(0.1, 20.0), dies=st.sampled_from([2.0, 5.0]), seed=st.integers(0, 9))
def test_replacement_gets_a_dead_nodes_place_even_if_started_at_once(after: float, dies: float, seed: int) -> None:
    cluster = run(Kill(1, at=dies), Join(1, at=dies + after), seed=seed)

    rounds = [record for record in cluster.history if isinstance(record, Finalized)]
    assert {"n0", "n1", "n2"} == {node.partition("/")[0] for node in rounds[-1].nodes}
    assert {0} == {record.restarts for record in rounds}
    assert ["succeeded"] * 3 == [node.outcome.kind for node in cluster.members if node.outcome]


@pytest.mark.parametrize("coordinator", ["fixed", "elected"])
def test_a_second_agent_beside_a_living_one_is_refused_and_disturbs_nobody(coordinator: str) -> None:
    cluster = run(Join(1, at=5.0), coordinator=coordinator)

    (refused,) = [node.outcome for node in cluster.members if node.outcome and node.outcome.kind != "succeeded"]
    assert "refused" == refused.kind and "node rank 1 was given twice" in refused.why
    assert 1 == len([record for record in cluster.history if isinstance(record, Finalized)])
