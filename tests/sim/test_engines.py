"""Calls on a thousand machines whose engine has faults: one decision, in time, by no event of a replaced agent."""

from __future__ import annotations

import pytest
from attrs import evolve

from elasticlib.engines import Action, CallRules, ReturnResults, Supervisor
from elasticlib.engines._supervisor import SupervisorEvent
from tests.sim.engines import EngineFaults, SimulatedCall
from tests.sim.simulator import InvariantBroken

pytestmark = pytest.mark.sampled(0.5)

NONE = EngineFaults(0, 0, 0, 0, 0, 0, 0, 0)
MANY = CallRules(1000, 950)


@pytest.mark.parametrize("endpoint", ["", "head:9"])
@pytest.mark.parametrize("seed", range(10))
def test_call_on_a_thousand_machines_with_faults_ends_once(endpoint: str, seed: int) -> None:
    SimulatedCall(evolve(MANY, endpoint=endpoint), EngineFaults(), seed).run()


def small_call(seed: int) -> SimulatedCall:
    """A call on few machines with many faults."""
    faults = EngineFaults(0.5, 0.5, 0.5, 0.3, 0.5, 0.5, 0.3, 0.2)
    return SimulatedCall(CallRules(4, 1 + seed % 4, replacements=2, restarts=2), faults, seed)


@pytest.mark.parametrize("seed", range(200))
def test_call_on_few_machines_with_many_faults_ends_once(seed: int) -> None:
    small_call(seed).run()


def test_supervisor_that_takes_events_of_replaced_agents_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Supervisor.handle

    def handle_all(supervisor: Supervisor, event: SupervisorEvent, now: float) -> list[Action]:
        return handle(supervisor, evolve(event, agent=supervisor.places[event.place].agent), now)

    monkeypatch.setattr(Supervisor, "handle", handle_all)

    with pytest.raises(InvariantBroken):
        for seed in range(200):
            small_call(seed).run()


@pytest.mark.parametrize(
    "faults", [NONE, evolve(NONE, lost=0.2), evolve(NONE, lost=0.2, late=1.0, cut_off=0.5), evolve(NONE, host_lost=0.5)]
)
def test_faults_that_can_be_repaired_cost_no_result(faults: EngineFaults) -> None:
    end = SimulatedCall(CallRules(1000, 500, restarts=10), faults, 1).run()

    assert ReturnResults() == end.decision


def test_thousand_losses_are_replaced_one_by_one() -> None:
    end = SimulatedCall(CallRules(1000, 100), evolve(NONE, lost=1.0), 1).run()

    assert ReturnResults() == end.decision
    assert end.actions["Replace"] >= 900
