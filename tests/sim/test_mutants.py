"""Wrong coordinators and wrong nodes: each must be caught by the invariants, or these are worth nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from elasticlib.agent import _policy
from elasticlib.rendezvous.coordinator import _departures, _node_liveness
from elasticlib.rendezvous.coordinator._state import Round
from elasticlib.rendezvous.node import _session_liveness
from elasticlib.rendezvous.node._session_liveness import SessionLiveness
from elasticlib.rendezvous.protocol._messages import ContactLost, RankAssignment
from elasticlib.testing import Cut, Fault, FaultPlan, Join, Kill, Leave, Pause, Stubborn, Suspend
from tests.sim.simulator import InvariantBroken, Rules, SimulatedCluster
from tests.sim.simulator.group import Group
from tests.sim.simulator.node import Node

RULES = Rules(1, 3, last_call=2.0, heartbeat=10.0)
LEAVING = (Stubborn(2, at=0.0, seconds=3.0), Leave(2, at=5.0))
CUT = (Cut(2, at=5.0, seconds=40.0),)
SLEPT = (Suspend(2, at=5.0, seconds=16.0),)
STOPPED = (Pause(2, at=5.0, seconds=40.0, what="agent"), Pause(2, at=5.0, seconds=40.0, what="rendezvous"))
"""Launcher and sidecar of machine 2 are stopped, and its workers run on."""
SUCCEEDED_AND_CUT = (Pause(1, at=55.0, seconds=9.0), Cut(2, at=61.0, seconds=9.0))
"""Machine 2 ends its work, machine 1 stands still at that moment; then 2 is out of contact when the job succeeds."""
FULL = evolve(RULES, min_nodes=3)
SUCCEEDED_AND_REPLACED = (
    *(Join(3, at=3.0), Join(4, at=3.5)),
    *(Pause(1, at=55.0, seconds=9.0), Kill(1, at=60.5), Cut(2, at=61.0, seconds=40.0)),
)
"""Machine 2 ends its work and is out of contact when machine 1 dies: two spares do the next round in their place."""
CHANGING = (Join(3, at=5.0), Kill(0, at=10.0))

Mutate = Callable[[pytest.MonkeyPatch], None]


def seats_without_waiting_for_the_old_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Round, "has_workers", False)


def recomputes_ranks_from_the_list_of_names(patch: pytest.MonkeyPatch) -> None:
    assigned = Node._start_workers

    def start(node: Node, assignment: RankAssignment) -> None:
        names = sorted(f"{other.number}" for other in node.cluster.members if other.agent.alive)
        place = names.index(f"{node.number}")
        assigned(node, evolve(assignment, group_rank=place, rank_base=place))

    patch.setattr(Node, "_start_workers", start)


def does_not_fence_itself(patch: pytest.MonkeyPatch) -> None:
    def never(contact: SessionLiveness) -> float:
        return float("inf")

    patch.setattr(_session_liveness, "_fence_at", never)
    patch.setattr(_session_liveness, "kill_at", lambda contact: None)


def forgets_its_success_when_contact_is_lost(patch: pytest.MonkeyPatch) -> None:
    sound = _policy._REACTIONS[ContactLost]

    def forget(state: _policy.AgentState, loss: ContactLost) -> _policy.Step:
        after, actions = sound(state, loss)
        return evolve(after, succeeded=False), actions

    patch.setattr(_policy, "_REACTIONS", {**_policy._REACTIONS, ContactLost: forget})


def takes_its_old_results_for_those_of_any_round(patch: pytest.MonkeyPatch) -> None:
    sound = _policy._done

    def done(state: _policy.AgentState, *first: _policy.Action) -> _policy.Step:
        final = state.final
        return sound(state if final is None else evolve(state, final=evolve(final, round=state.round)), *first)

    patch.setattr(_policy, "_done", done)


def does_not_see_that_it_slept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_session_liveness, "SLEPT", float("inf"))


def sends_no_given_up_notice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_node_liveness, "heard_again", lambda state, counts: (state, ()))
    patch.setattr(_departures, "_send_given_up", lambda entries, why: ())


def takes_what_is_stored_for_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_session_liveness, "_alive_at", lambda contact: contact.acknowledged)


def does_not_know_of_sleep(patch: pytest.MonkeyPatch) -> None:
    for mutate in WAYS:
        mutate(patch)


WAYS = (does_not_see_that_it_slept, sends_no_given_up_notice, takes_what_is_stored_for_read)


def workers_have_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "watch_lease", lambda group, watcher: None)


MUTANTS: dict[str, tuple[Mutate, Rules, tuple[Fault, ...]]] = {
    "no sequence check": (seats_without_waiting_for_the_old_round, RULES, LEAVING),
    "recomputed ranks": (recomputes_ranks_from_the_list_of_names, evolve(RULES, max_nodes=4), CHANGING),
    "no fencing": (does_not_fence_itself, RULES, CUT),
    "no sense of sleep": (does_not_know_of_sleep, RULES, SLEPT),
    "no lease": (workers_have_no_lease, RULES, STOPPED),
    "forgotten success": (forgets_its_success_when_contact_is_lost, RULES, SUCCEEDED_AND_CUT),
    "results of any round": (takes_its_old_results_for_those_of_any_round, FULL, SUCCEEDED_AND_REPLACED),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("coordinator", ["fixed", "elected"])
def test_a_mutant_is_caught(name: str, coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, rules, faults = MUTANTS[name]
    mutate(monkeypatch)

    with pytest.raises(InvariantBroken, match=r"at [0-9.]+ s: "):
        SimulatedCluster(rules, plan=plan_for(faults, coordinator), coordinator=coordinator).run()


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("coordinator", ["fixed", "elected"])
def test_same_faults_break_nothing_without_the_mutant(name: str, coordinator: str) -> None:
    _, rules, faults = MUTANTS[name]

    SimulatedCluster(rules, plan=plan_for(faults, coordinator), coordinator=coordinator).run()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coordinator", ["fixed", "elected"])
def test_a_machine_that_slept_is_stopped_in_any_of_three_ways(
    way: Mutate, coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It sees how far the job's time has gone on; whoever gave it up says so when it is heard again; and its heartbeats
    are not read any more.
    """
    for mutate in WAYS:
        if mutate is not way:
            mutate(monkeypatch)

    SimulatedCluster(RULES, plan=FaultPlan(SLEPT), coordinator=coordinator).run()


def plan_for(faults: tuple[Fault, ...], coordinator: str) -> FaultPlan:
    """With a fixed coordinator the first machine must live on: another one dies."""
    moved = (Kill(1, fault.at) if isinstance(fault, Kill) and coordinator == "fixed" else fault for fault in faults)
    return FaultPlan(moved)
