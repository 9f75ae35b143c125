"""Wrong coordinators and wrong nodes: each must be caught by the invariants, or these are worth nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from elasticlib.rendezvous import _contact
from elasticlib.rendezvous._contact import Contact
from elasticlib.rendezvous._messages import Seat
from elasticlib.rendezvous._state import Round
from elasticlib.testing import (
    Cut,
    Fault,
    FaultPlan,
    InvariantBroken,
    Join,
    Kill,
    Leave,
    Rules,
    SimulatedCluster,
    Stubborn,
)
from elasticlib.testing._node import Node

RULES = Rules(1, 3, last_call=2.0, heartbeat=10.0)
LEAVING = (Stubborn(2, at=0.0, seconds=3.0), Leave(2, at=5.0))
CUT = (Cut(2, at=5.0, seconds=40.0),)
CHANGING = (Join(3, at=5.0), Kill(0, at=10.0))

Mutate = Callable[[pytest.MonkeyPatch], None]


def seats_without_waiting_for_the_old_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Round, "has_workers", False)


def recomputes_ranks_from_the_list_of_names(patch: pytest.MonkeyPatch) -> None:
    seated = Node._start_workers

    def start(node: Node, seat: Seat) -> None:
        names = sorted(f"{other.number}" for other in node.cluster.members if other.agent.alive)  # type: ignore[attr-defined]
        place = names.index(f"{node.number}")
        seated(node, evolve(seat, group_rank=place, rank_base=place))

    patch.setattr(Node, "_start_workers", start)


def does_not_fence_itself(patch: pytest.MonkeyPatch) -> None:
    def never(contact: Contact) -> float:
        return float("inf")

    patch.setattr(_contact, "_fence_at", never)
    patch.setattr(_contact, "kill_at", lambda contact: None)


MUTANTS: dict[str, tuple[Mutate, Rules, tuple[Fault, ...]]] = {
    "no sequence check": (seats_without_waiting_for_the_old_round, RULES, LEAVING),
    "recomputed ranks": (recomputes_ranks_from_the_list_of_names, evolve(RULES, max_nodes=4), CHANGING),
    "no fencing": (does_not_fence_itself, RULES, CUT),
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
def test_the_same_faults_are_no_trouble_without_the_mutant(name: str, coordinator: str) -> None:
    _, rules, faults = MUTANTS[name]

    SimulatedCluster(rules, plan=plan_for(faults, coordinator), coordinator=coordinator).run()


def plan_for(faults: tuple[Fault, ...], coordinator: str) -> FaultPlan:
    """With a fixed coordinator the first machine must live on: another one dies."""
    moved = (Kill(1, fault.at) if isinstance(fault, Kill) and coordinator == "fixed" else fault for fault in faults)
    return FaultPlan(moved)
