"""Who gets a request: the fork server itself, its copy, or neither for a while."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from elasticlib._wire import Channel, Message, wait_readable
from elasticlib.workers.spawner import _request_loop
from elasticlib.workers.spawner._request_loop import RequestLoop, _Copy

ORDER: Message = {"wanted": [], "env": {}, "own": [], "paced": False}


class House:
    """A fork server that forks nobody, its launcher's end, and the ends of the copies that it would have made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, control = Channel.pair()
        self.loop = RequestLoop(control, os.getppid(), frozenset(), {})
        self.forked: list[str] = []
        self.copies: list[_Copy] = []
        monkeypatch.setattr(self.loop, "_fork_for", self.fork_for)
        monkeypatch.setattr(self.loop, "_make_copy", self.make_copy)
        monkeypatch.setattr(self.loop._selector, "unregister", lambda _: None)

    def fork_for(self, message: Message, descriptors: list[int]) -> None:
        self.forked.append(message["copy"])
        for descriptor in descriptors:
            os.close(descriptor)

    def make_copy(self, copy: _Copy) -> None:
        self.copies.append(copy)
        self.loop._copy = copy

    def ask(self, copy: str, number: int = 7) -> None:
        """The launcher asks for a spawner."""
        ours, theirs = Channel.pair()
        self.launcher.send({"op": "job", "copy": copy, "number": number}, (theirs.fileno(),))
        theirs.close()
        self.loop._obey()
        ours.close()

    def order(self) -> _Copy:
        memory = os.memfd_create("order")
        os.write(memory, json.dumps(ORDER).encode())
        self.launcher.send({"op": "learn", "number": 7}, (memory,))
        os.close(memory)
        self.loop._obey()
        return self.copies[-1]

    def says(self, **message: object) -> None:
        """The newest copy says something."""
        copy = self.copies[-1]
        copy.theirs.send(message)
        self.loop._listen(copy)

    def told(self) -> list[Message]:
        """What the launcher has heard."""
        found = []
        while wait_readable([self.launcher], 0) and (received := self.launcher.receive()) is not None:
            found.append(received[0])
        return found


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(monkeypatch)
    yield house
    house.launcher.close()
    house.loop._control.close()
    house.loop._selector.close()
    for copy in house.copies:
        copy.channel.close()
        copy.theirs.close()


def test_without_a_copy_it_forks_by_itself(house: House) -> None:
    for wanted in ("none", "ready", "wait"):
        house.ask(wanted)

    assert ["none", "ready", "wait"] == house.forked


def test_whoever_wants_a_copy_that_is_ready_gets_it(house: House) -> None:
    copy = house.order()
    house.says(op="ready", names=["a"], files=[])

    house.ask("ready")
    house.ask("none")

    assert ["none"] == house.forked
    received = copy.theirs.receive()
    assert received is not None and (received[0], len(received[1])) == ({"op": "job", "copy": "none", "number": 7}, 1)
    assert [(7, ["a"], {}, True)] == [(m["number"], m["names"], m["refused"], m["done"]) for m in house.told()]
    os.close(received[1][0])


def test_whoever_would_rather_wait_does_so_until_it_is_ready(house: House) -> None:
    copy = house.order()
    house.ask("wait")
    house.ask("ready")
    assert ["ready"] == house.forked

    house.says(op="ready", names=["a"], files=[])

    assert ["ready"] == house.forked
    received = copy.theirs.receive()
    assert received is not None
    os.close(received[1][0])


def test_whoever_wants_the_copy_of_another_order_does_not_get_this_one(house: House) -> None:
    """It was made for a launch with other variables."""
    house.order()
    house.says(op="ready", names=["a"], files=[])

    house.ask("ready", number=6)
    house.ask("wait", number=8)

    assert ["ready", "wait"] == house.forked


def test_a_spoilt_copy_lets_go_of_those_who_wait_and_the_next_is_made_without(house: House) -> None:
    house.order()
    house.ask("wait")

    house.says(op="spoilt", module="a", why="it prints", instead=[["b", "f", [], 0]])

    assert ["ready"] == house.forked
    assert 2 == len(house.copies)
    assert {"a": ["it prints", [["b", "f", [], 0]]]} == house.copies[-1].refused
    assert [(None, {"a": ["it prints", [["b", "f", [], 0]]]}, False)] == [
        (m["names"], m["refused"], m["done"]) for m in house.told()
    ]


def test_after_one_that_was_spoilt_nobody_waits_and_the_workers_come_first(house: House) -> None:
    first = house.order()
    house.says(op="spoilt", module="a", why="it prints", instead=[])

    house.ask("wait")

    assert ["wait"] == house.forked
    assert [False, True] == [first.order["paced"], house.copies[-1].order["paced"]]


def test_after_one_that_was_spoilt_by_an_unknown_import_each_is_looked_at(house: House) -> None:
    house.order()

    house.says(op="spoilt", module="", why="the imports change json.dumps", instead=[])

    assert [({}, True)] == [(copy.refused, copy.order["paced"]) for copy in house.copies[1:]]
    assert [(None, {}, False)] == [(m["names"], m["refused"], m["done"]) for m in house.told()]


def test_what_ends_the_copy_while_it_imports_is_refused(house: House) -> None:
    copy = house.order()
    house.says(op="trying", module="a")

    copy.theirs.close()
    house.loop._listen(copy)

    assert {"a": ["its import ends the process", []]} == house.copies[-1].refused


def test_the_end_of_a_copy_that_serves_refuses_nothing(house: House) -> None:
    copy = house.order()
    house.says(op="trying", module="a")
    house.says(op="ready", names=["a"], files=[])

    copy.theirs.close()
    house.loop._listen(copy)
    house.ask("ready")

    assert 1 == len(house.copies)
    assert ["ready"] == house.forked
    assert [(["a"], True), (None, True)] == [(m["names"], m["done"]) for m in house.told()]


def test_a_copy_that_is_spoilt_again_and_again_is_given_up(house: House) -> None:
    house.order()

    for number in range(_request_loop._MOST_SPOILT + 1):
        house.says(op="spoilt", module=f"m{number}", why="it prints", instead=[])

    assert _request_loop._MOST_SPOILT + 1 == len(house.copies)
    assert [True] == [each["done"] for each in house.told()][-1:]
    assert house.loop._copy is None


def test_patience_with_a_copy_ends(house: House) -> None:
    """First of those who wait for it, then with what it imports."""
    copy = house.order()
    house.says(op="trying", module="hangs")
    house.ask("wait")
    copy.began -= _request_loop._WAITS
    assert 0.0 == house.loop._patience()
    house.loop._lose_patience(copy)
    assert ["ready"] == house.forked

    copy.began -= _request_loop._TAKES
    assert 0.0 == house.loop._patience()
    house.loop._lose_patience(copy)

    assert {"hangs": ["its import takes too long", []]} == house.copies[-1].refused
