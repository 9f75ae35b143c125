"""A node that asks for the place of a dead one, whose death is not yet known."""

from __future__ import annotations

import pytest

from elasticlib.rendezvous.coordinator._handover import decode_state, encode_state
from elasticlib.rendezvous.coordinator._state import Heartbeats, Rules
from elasticlib.rendezvous.protocol._messages import Caution, Descriptor, Final, Join, RankAssignment
from tests.unit.rendezvous.coordinator.test_coordinator import Desk

TWICE = "node rank 1 was given twice: node h1/1 has it, and node {} asks for it"


def offer(index: int, *, is_scheduled: bool = False) -> Descriptor:
    return Descriptor(2, "trainer", ("10.0.0.1",), 1, index, is_scheduled=is_scheduled)


def at_work(*, nodes: int = 2, heartbeat: float = 10.0, missing: int = 0) -> Desk:
    """Nodes ``h0/1``, ``h1/1`` ... with a place each, of which the *missing* last ones have not come yet."""
    desk = Desk(Rules(nodes, nodes, fixed_places=True, heartbeat=heartbeat))
    desk._step(Heartbeats({}))
    for index in range(nodes - missing):
        desk.receive(Join(f"h{index}/1", offer(index)))
    return desk.node_heartbeat()


def refusals(desk: Desk) -> dict[str, str]:
    return {node: its.why for node, its in desk.sent().items() if isinstance(its, Final) and its.kind == "refused"}


def assigned(desk: Desk) -> set[str]:
    return {node for node, its in desk.sent().items() if isinstance(its, RankAssignment)}


def test_a_replacement_waits_until_its_predecessor_is_lost() -> None:
    desk = at_work()
    mailbox = desk.receive(Join("h1/2", offer(1)))

    (caution,) = desk.mailboxes[mailbox]
    assert isinstance(caution, Caution) and "belongs to node h1/1: node h1/2 waits" in caution.text
    desk.node_heartbeat("h1/1", seconds=12.0)

    assert {"h0/1": True} == {n: its.restart for n, its in desk.sent().items() if n == "h0/1"}  # type: ignore[union-attr]
    desk.receive(Join("h0/1", offer(0)))
    assert {"h0/1", "h1/2"} == assigned(desk)
    assert 0 == desk.state.restarts


def test_replacement_is_refused_once_its_predecessor_sends_heartbeat() -> None:
    desk = at_work()
    desk.receive(Join("h1/2", offer(1)))
    desk.node_heartbeat()
    assert {} == refusals(desk)

    desk.node_heartbeat()

    assert {"h1/2": TWICE.format("h1/2")} == refusals(desk)
    assert desk.state.round is not None and desk.state.round.end is None


@pytest.mark.parametrize("is_late", [False, True], ids=["before the replacement came", "and read late"])
def test_heartbeats_refuse_no_replacement_if_sent(is_late: bool) -> None:
    """They were sent by the node that has died since."""
    desk = at_work()
    desk.receive(Join("h1/2", offer(1)))
    if is_late:
        desk.node_heartbeat(seconds=8.0, interval=8.0)
    else:
        desk.node_heartbeat()
        desk.node_heartbeat("h1/1", seconds=20.0)

    assert "h1/2" in desk.state.waiting


def test_a_replacement_does_not_stand_for_a_missing_node() -> None:
    desk = at_work(nodes=3, missing=1)
    desk.receive(Join("h1/2", offer(1)))
    assert set() == assigned(desk)
    desk.node_heartbeat("h1/1", seconds=12.0)

    desk.receive(Join("h2/1", offer(2)))

    assert {"h0/1", "h1/2", "h2/1"} == assigned(desk)


def test_of_two_replacements_the_living_one_gets_the_place() -> None:
    desk = at_work()
    desk.receive(Join("h1/2", offer(1)), Join("h1/3", offer(1)))
    dead = ("h1/1", "h1/2")
    desk.node_heartbeat(*dead, seconds=12.0)
    desk.receive(Join("h0/1", offer(0)))
    desk.node_heartbeat(*dead, seconds=12.0)

    assert desk.state.round is not None and {"h0/1", "h1/3"} == desk.state.round.entries.keys()


def test_a_living_predecessor_that_asks_again_keeps_its_place() -> None:
    desk = at_work()
    desk.receive(Join("h1/2", offer(1)), Join("h1/1", offer(1)), Join("h0/1", offer(0)))

    assert {"h0/1", "h1/1"} == assigned(desk)
    desk.node_heartbeat(seconds=6.0)
    assert {"h1/2": TWICE.format("h1/2")} == refusals(desk)


@pytest.mark.parametrize(("is_scheduled", "waits"), [(True, True), (False, False)])
def test_a_replacement_on_another_host_needs_a_number_of_its_scheduler(is_scheduled: bool, waits: bool) -> None:
    desk = at_work()
    desk.receive(Join("h7/1", offer(1, is_scheduled=is_scheduled)))

    assert ({} if waits else {"h7/1": TWICE.format("h7/1")}) == refusals(desk)


def test_taken_place_is_refused_at_once_without_heartbeats() -> None:
    desk = Desk(Rules(2, 2, fixed_places=True))
    desk.receive(Join("h1/1", offer(1)), Join("h1/2", offer(1)))

    assert {"h1/2": TWICE.format("h1/2")} == refusals(desk)


def test_another_coordinator_knows_who_is_a_replacement() -> None:
    desk = at_work()
    desk.receive(Join("h1/2", offer(1, is_scheduled=True)))

    heir = decode_state(encode_state(desk.state, desk.now), 7.0)

    assert [True] == [entry.is_replacement for entry in heir.waiting.values()]
    assert offer(1, is_scheduled=True) == heir.waiting["h1/2"].descriptor
