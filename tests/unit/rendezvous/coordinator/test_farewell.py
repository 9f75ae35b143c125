"""The node that coordinates leaves once the workers of all others have ended, where the nodes end together."""

from __future__ import annotations

import pytest

from elasticlib.rendezvous.coordinator._farewell import Farewell
from elasticlib.rendezvous.coordinator._server_events import Abandon, CloseServer
from elasticlib.rendezvous.coordinator._state import Entry, JobState, Round, Rules
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Descriptor,
    Failed,
    Leave,
    Report,
    Stopped,
    Succeeded,
)
from tests.unit.rendezvous.coordinator.served import Served

ENTRIES = {node: Entry(node, f"{node}/1", 1, Descriptor(1, "trainer", ("10.0.0.1",), 1)) for node in "abcd"}


def state(**progress: frozenset[str]) -> JobState:
    return JobState(Rules(1, 4), round=Round(0, ENTRIES, (), **progress))


def begun() -> Farewell:
    return Farewell.begin(state(stopped=frozenset("c"), succeeded=frozenset("d")), "a", 0.0)


def test_only_nodes_whose_workers_may_run_are_waited_for() -> None:
    assert begun()
    assert not Farewell.begin(state(stopped=frozenset("bcd")), "a", 0.0)
    assert not Farewell.begin(state(stopped=frozenset("cd"), lost=frozenset("b")), "a", 0.0)
    assert not Farewell.begin(JobState(Rules(1, 4)), "a", 0.0)


@pytest.mark.parametrize(
    ("report", "is_waited_for"),
    [
        (Stopped("b", 0, ()), False),
        (Succeeded("b", 0), False),
        (Leave("b", "its agent died", lost=True), False),
        (Leave("b", "signal 15", 0), True),
        (Failed("b", 0, ()), True),
        (Acknowledgement("b"), True),
        (Stopped("c", 0, ()), True),
    ],
)
def test_a_node_is_waited_for_until_its_workers_have_ended(report: Report, is_waited_for: bool) -> None:
    assert is_waited_for is bool(begun().reported(report))


def test_a_silent_node_is_not_waited_for() -> None:
    farewell = begun().after_heartbeats({"b/1": 1}, 9.0, 10.0)

    assert farewell.after_heartbeats({"b/1": 2}, 18.0, 10.0)
    assert not farewell.after_heartbeats({"b/1": 1}, 19.0, 10.0)


@pytest.mark.parametrize("ends_together", [False, True])
def test_the_coordinator_stays_until_the_others_have_saved(ends_together: bool) -> None:
    store = Served(Rules(2, 2, ends_together=ends_together), journaled=False).begin_term()
    store.join("a")
    store.join("b")
    store.send(Leave("b", "signal 15", 0))

    store.handle(Abandon("node a left: signal 15", "a"))
    store.send()
    store.handle(CloseServer(30.0))
    store.send()
    assert store.stopped is not ends_together

    store.send(Stopped("b", 0, ()))
    assert store.stopped
