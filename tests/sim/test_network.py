"""The simulated network loses, delays and repeats what a real one may, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.sim.simulator.network import Link, Network
from tests.sim.simulator.store import LOST, Connection, Store
from tests.sim.simulator.timeline import Process, Timeline


class Scene:
    """A store, a client, and what the client was told."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.client = Process("client", self.timeline)
        self.link = Link(1)
        self.store = Store(Process("store", self.timeline), Link(0), Network(self.timeline, random.Random(0)))
        self.received: list[Any] = []
        self.connection = self.connect()
        self.go_on()

    def connect(self) -> Connection:
        return self.store.connect(self.client, self.link, lambda _: None, self.received.append)

    def call(self, kind: str, *arguments: Any, connection: Connection | None = None) -> None:
        (connection or self.connection).call(kind, *arguments, then=self.received.append)

    def go_on(self, until: float = float("inf")) -> None:
        while (soon := self.timeline.next_at()) is not None and soon <= until:
            self.timeline.step()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_requests_of_a_connection_keep_their_order(scene: Scene) -> None:
    for number in range(20):
        scene.call("write", {"key": number})
    scene.call("read", ["key"])
    scene.go_on()

    assert [19] == scene.received[-1]


def test_a_broken_connection_may_have_written_what_it_did_not_acknowledge(scene: Scene) -> None:
    scene.call("write", {"key": 1})
    while "key" not in scene.store.values:
        scene.timeline.step()
    scene.connection.reset("reset")
    scene.go_on()

    assert ["reset"] == scene.received


def test_request_on_its_way_when_a_connection_breaks_is_lost(scene: Scene) -> None:
    scene.call("write", {"key": 1})
    scene.connection.reset("reset")
    scene.go_on()

    assert ({}, ["reset"]) == (scene.store.values, scene.received)


def test_a_cut_link_delays_and_loses_nothing(scene: Scene) -> None:
    scene.link.cut_until = scene.timeline.now + 20.0
    scene.call("write", {"key": 1})

    scene.go_on(until=19.9)
    assert {} == scene.store.values
    scene.go_on()
    assert {"key": 1} == scene.store.values


def test_request_that_a_client_has_given_up_still_arrives(scene: Scene) -> None:
    scene.call("write", {"key": 1})
    scene.connection.close()
    scene.go_on()

    assert ({"key": 1}, []) == (scene.store.values, scene.received)


def test_a_frozen_store_answers_when_it_wakes(scene: Scene) -> None:
    scene.store.process.thaws_at = 30.0
    scene.call("read", ["key"])
    scene.go_on()

    assert [[None]] == scene.received
    assert scene.timeline.now >= 30.0


def test_a_dead_process_refuses_and_a_dead_machine_is_silent(scene: Scene) -> None:
    scene.store.end()
    scene.connect()
    scene.go_on()
    assert ["connection reset by peer", "connection refused"] == scene.received

    scene.store.link.alive = False
    scene.connect()
    scene.go_on()
    assert 2 == len(scene.received)


def test_a_wait_ends_with_the_write(scene: Scene) -> None:
    scene.call("wait", "key")
    scene.go_on()
    assert [] == scene.received

    other = scene.connect()
    scene.call("write", {"key": 1}, connection=other)
    scene.go_on()
    assert [True, None] == sorted(scene.received, key=str, reverse=True)


def test_entries_stay_until_they_are_discarded(scene: Scene) -> None:
    scene.call("post", "letter")
    scene.call("receive")
    scene.go_on()
    other = scene.connect()
    scene.call("receive", connection=other)
    scene.go_on()

    assert ["letter"] == [entry.data for entry in scene.received[-1]]


def test_lease_ends_if_not_renewed_and_waiting_client_is_notified(scene: Scene) -> None:
    scene.call("seize", "one", 5.0)
    scene.call("seize", "two", 5.0)
    scene.call("changed", 1)
    scene.go_on(until=4.9)
    assert [1, None] == scene.received
    scene.go_on(until=5.5)
    scene.call("look")
    scene.go_on(until=6.0)

    assert [None, (2, False)] == scene.received[2:]


def test_renewed_lease_continues(scene: Scene) -> None:
    scene.call("seize", "one", 5.0)
    scene.call("renew", 1, 20.0)
    scene.go_on(until=19.0)

    assert scene.store.lease is not None and "one" == scene.store.lease.holder


def test_former_leader_changes_nothing(scene: Scene) -> None:
    scene.call("seize", "one", 5.0)
    scene.go_on(until=5.5)
    scene.call("seize", "two", 5.0)
    scene.go_on(until=6.0)
    scene.connection.term = 1
    scene.call("save", 1, "old")
    scene.call("write", {"key": "old"})
    scene.go_on(until=6.5)

    assert [False, LOST] == scene.received[2:]
    assert ({}, None) == (scene.store.values, scene.store.document)
