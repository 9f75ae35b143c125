"""Nodes that must end while all train: the workers of all nodes return in one call, whatever goes wrong meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
from attrs import evolve
from hypothesis import given, settings, strategies as st

from elasticlib.rendezvous.coordinator import _common_stop
from elasticlib.rendezvous.coordinator._state import Action, JobState, Round, Send
from elasticlib.rendezvous.protocol._messages import StopAgreed, StopProposed
from elasticlib.testing import Break, Cut, Fault, FaultPlan, Kill, Leave, Pause, Slow
from tests.sim.checks import CheckedCluster
from tests.sim.promises import kinds
from tests.sim.simulator import Finalized, Rules, SimulatedCluster

pytestmark = pytest.mark.sampled(1.0)

RULES = Rules(2, 3, 3, last_call=2.0, heartbeat=10.0)
ALL_NEEDED = Rules(3, 3, 3, heartbeat=10.0)
COORDINATORS = ("fixed", "elected", "served")
FEWER = settings.default.max_examples // 5 if settings.default else 10


def run(
    notices: Mapping[int, float], *faults: Fault, rules: Rules = RULES, coordinator: str = "fixed", seed: int = 0
) -> SimulatedCluster:
    """Run a job whose nodes are told at these times that they must end."""
    cluster = CheckedCluster(rules, 3, FaultPlan(faults), coordinator, seed, 60.0)
    for number, at in notices.items():
        cluster.timeline.at(at, None, functools.partial(notify, cluster, number))
    return cluster.run()


def notify(cluster: SimulatedCluster, number: int) -> None:
    for node in cluster.machines[number].present()[-1:]:
        cluster.timeline.at(cluster.now, node.agent, node.notice)


def saves(cluster: SimulatedCluster) -> dict[int, dict[str, int]]:
    """Return {round: {machine: the call in which its workers returned}}."""
    found: dict[int, dict[str, int]] = {}
    for node in cluster.members:
        for stop in node.stops:
            if stop.returned_in is not None:
                of_round = found.setdefault(stop.group.assignment.round, {})
                of_round[node.name.partition("/")[0]] = stop.returned_in
    return found


def demand_one_step(cluster: SimulatedCluster) -> None:
    for number, calls in saves(cluster).items():
        assert 1 == len(set(calls.values())), f"round {number}: {calls}\n{cluster.describe()}"


@pytest.mark.parametrize("coordinator", COORDINATORS)
@pytest.mark.parametrize("between", [0.0, 0.01, 0.3])
def test_all_nodes_that_must_end_save_in_one_call(coordinator: str, between: float) -> None:
    cluster = run({0: 5.0, 1: 5.0 + between, 2: 5.0 + 2 * between}, coordinator=coordinator)

    assert {0: {"n0", "n1", "n2"}} == {number: set(calls) for number, calls in saves(cluster).items()}
    demand_one_step(cluster)
    assert ["left"] * 3 == kinds(cluster)


@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_others_save_with_a_node_that_must_end_and_go_on_without_it(coordinator: str) -> None:
    cluster = run({1: 5.0}, coordinator=coordinator)

    assert {0: {"n0", "n1", "n2"}} == {number: set(calls) for number, calls in saves(cluster).items()}
    demand_one_step(cluster)
    assert ["succeeded", "left", "succeeded"] == kinds(cluster)
    assert {0} == {record.restarts for record in cluster.history if isinstance(record, Finalized)}


def test_nodes_save_with_the_host_of_the_store_that_must_end() -> None:
    cluster = run({0: 5.0})

    assert {0: {"n0", "n1", "n2"}} == {number: set(calls) for number, calls in saves(cluster).items()}
    demand_one_step(cluster)
    assert "succeeded" not in kinds(cluster)


def test_a_coordinator_that_agrees_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = _common_stop.settle

    def agree_at_once(state: JobState, current: Round) -> tuple[JobState, tuple[Action, ...]]:
        state, actions = settle(state, current)
        sent = [each for each in actions if isinstance(each, Send) and isinstance(each.notice, StopProposed)]
        early = [evolve(each, notice=StopProposed(current.number, 1)) for each in sent]
        agreed = [evolve(each, notice=StopAgreed(current.number)) for each in sent]
        return state, (*early, *agreed)

    monkeypatch.setattr(_common_stop, "settle", agree_at_once)

    with pytest.raises(AssertionError, match="round 0: "):
        demand_one_step(run({1: 5.0}))


moments = st.floats(4.0, 9.0)
numbers = st.integers(0, 2)
faults = st.one_of(
    st.builds(Kill, numbers, moments),
    st.builds(Kill, numbers, moments, st.sampled_from(["agent", "rendezvous"])),
    st.builds(Leave, numbers, moments),
    st.builds(Break, numbers, moments),
    st.builds(Cut, numbers, moments, st.floats(0.1, 30.0)),
    st.builds(Slow, numbers, moments, st.floats(0.1, 10.0), st.floats(0.01, 2.0)),
    st.builds(Pause, numbers, moments, st.floats(0.1, 30.0), st.sampled_from(["machine", "agent", "rendezvous"])),
)


@settings(max_examples=FEWER)
@given(
    notices=st.dictionaries(numbers, moments, min_size=1),
    troubles=st.lists(faults, max_size=2),
    coordinator=st.sampled_from(COORDINATORS),
    rules=st.sampled_from([RULES, ALL_NEEDED]),
    seed=st.integers(0, 9),
)
def test_nodes_return_in_the_same_call_whatever_fails(
    notices: dict[int, float], troubles: list[Fault], coordinator: str, rules: Rules, seed: int
) -> None:
    cluster = run(notices, *troubles, rules=rules, coordinator=coordinator, seed=seed)

    demand_one_step(cluster)
