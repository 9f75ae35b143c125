"""Texts for people, which decide nothing: other words in messages change no decision."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from elasticlib.agent import _policy
from elasticlib.rendezvous.coordinator import _coordinator
from elasticlib.rendezvous.coordinator._state import Event, JobState, Outcome
from elasticlib.testing import Cut, FailWorker, FaultPlan, Flap, Kill, Leave
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import Rules, SimulatedCluster, strategies

pytestmark = pytest.mark.sampled(1.0)

FOR_PEOPLE = {"why", "cause", "message", "traceback", "hint", "exception_type", "gone", "story"}
"""Fields whose texts are sentences."""
REASONS = {"left"}
"""Fields that map nodes to sentences."""
FEWER = max(settings.default.max_examples // 3, 5) if settings.default else 50


def scrambled(value: Any) -> Any:
    """The same, with as much nonsense in place of each sentence."""
    if attrs.has(type(value)):
        fields = {each.name: getattr(value, each.name) for each in attrs.fields(type(value)) if each.init}
        return attrs.evolve(value, **{name: _scrambled_field(name, its) for name, its in fields.items()})
    if isinstance(value, tuple):
        return tuple(map(scrambled, value))
    if isinstance(value, Mapping):
        return {key: scrambled(its) for key, its in value.items()}
    return value


def _scrambled_field(name: str, value: Any) -> Any:
    if name in FOR_PEOPLE and isinstance(value, str):
        return _nonsense(value)
    if name in REASONS and isinstance(value, Mapping):
        return {node: _nonsense(why) for node, why in value.items()}
    return scrambled(value)


def _nonsense(text: str) -> str:
    return "x" * len(text) if text else ""


def shape(value: Any) -> Any:
    """Return the decisions in *value*: all but the texts for people."""
    if attrs.has(type(value)):
        fields = {each.name: getattr(value, each.name) for each in attrs.fields(type(value))}
        return type(value), {name: bool(its) if _is_text(name, its) else shape(its) for name, its in fields.items()}
    if isinstance(value, (tuple, list)):
        return [shape(each) for each in value]
    if isinstance(value, Mapping):
        return {key: shape(its) for key, its in value.items()}
    return value


def _is_text(name: str, value: Any) -> bool:
    return name in FOR_PEOPLE or (name in REASONS and isinstance(value, Mapping))


def watched(before: SimulatedCluster) -> SimulatedCluster:
    """The same job, whose every decision is taken once more with other words."""
    logic = types.SimpleNamespace(**vars(_coordinator))
    logic.step = _step
    return CheckedCluster(
        before.rules, before.nodes, before.plan, before.coordinator, before.seed, before.work, logic=logic
    )


def _step(state: JobState, event: Event, now: float) -> Outcome:
    decided = _coordinator.step(state, event, now)
    assert shape(decided) == shape(_coordinator.step(scrambled(state), scrambled(event), now))
    return decided


def _policy_step(state: _policy.AgentState, event: _policy.Event) -> _policy.Step:
    decided = _ORIGINAL(state, event)
    assert shape(decided) == shape(_ORIGINAL(scrambled(state), scrambled(event)))
    return decided


_ORIGINAL = _policy.step


def run(cluster: SimulatedCluster) -> SimulatedCluster:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_policy, "step", _policy_step)
        return watched(cluster).run()


@pytest.mark.parametrize("coordinator", ["fixed", "elected"])
def test_messages_with_other_text_change_no_decision(coordinator: str) -> None:
    """Failures, a dead agent, a dead machine, one that leaves, one that comes and goes, one that is cut off."""
    plan = FaultPlan(
        (
            FailWorker(1, at=5.0, secondary=True),
            Kill(2, at=8.0, what="agent"),
            FailWorker(0, at=20.0),
            Kill(3, at=25.0),
            Flap(4, at=30.0, seconds=20.0),
            Leave(1, at=60.0),
            Cut(5, at=70.0, seconds=15.0),
        )
    )
    run(SimulatedCluster(Rules(1, 6, 9, last_call=2.0, heartbeat=10.0), 6, plan, coordinator, work=100.0))


@settings(max_examples=FEWER)
@given(
    cluster=st.builds(
        SimulatedCluster,
        strategies.rules(),
        st.integers(1, 4),
        strategies.fault_plans(4),
        st.sampled_from(("fixed", "elected")),
        st.integers(0, 9),
        st.just(20.0),
    )
)
def test_messages_with_other_text_change_no_decision_of_drawn_jobs(cluster: SimulatedCluster) -> None:
    run(cluster)
