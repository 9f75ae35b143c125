"""Nodes that were told to run one script with other arguments: a spare that was never needed is no success for them."""

from __future__ import annotations

import json

import pytest

from elasticlib.rendezvous.coordinator._handover import decode_state, encode_state
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._messages import (
    Caution,
    Descriptor,
    Final,
    GivenUp,
    Join,
    Notice,
    RankAssignment,
    Succeeded,
)
from tests.unit.rendezvous.coordinator.test_coordinator import Desk

SLOW, FAST = "train.py --lr 0.1", "train.py --lr 0.2"


class Commands(Desk):
    """Nodes that were started with commands."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(Rules(least, most, wait_for="min"))

    def start(self, node: str, command: str, role: str = "trainer", last_round: int = -1) -> None:
        offer = Descriptor(1, role, ("10.0.0.1",), 1, work="train.py", command=command)
        self.receive(Join(node, offer, round=last_round))

    def notices(self, node: str) -> list[Notice | GivenUp]:
        boxes = [box for mailbox, box in self.mailboxes.items() if mailbox.startswith(f"{node}/")]
        return [notice for box in boxes for notice in box]

    def cautions(self, node: str) -> list[str]:
        return [notice.text for notice in self.notices(node) if isinstance(notice, Caution)]

    def last(self, node: str) -> object:
        return self.notices(node)[-1]


def test_job_of_one_node_refuses_other_arguments_with_both_commands() -> None:
    desk = Commands(1, 1)
    desk.start("a", SLOW)
    desk.start("b", FAST)

    final = desk.last("b")
    assert isinstance(final, Final)
    assert ("refused", False) == (final.kind, final.succeeded)
    assert f"node b runs `{FAST}`, but node a of this job runs `{SLOW}`, and this job has one node" in final.why
    assert not desk.cautions("a")


@pytest.mark.parametrize("command", [SLOW, ""])
def test_spare_with_equal_or_unknown_arguments_ends_with_success(command: str) -> None:
    desk = Commands(1, 1)
    desk.start("a", SLOW)
    desk.start("b", command)
    desk.receive(Succeeded("a", 0))

    final = desk.last("b")
    assert isinstance(final, Final)
    assert final.succeeded


def job_with_spare() -> Commands:
    desk = Commands(2, 2)
    desk.start("a", SLOW)
    desk.start("b", SLOW)
    desk.start("c", FAST)
    return desk


def test_both_nodes_warn_of_arguments_that_differ() -> None:
    desk = job_with_spare()

    [here], [there] = desk.cautions("a"), desk.cautions("c")
    assert here == there
    assert f"node c runs `{FAST}`, but node a of this job runs `{SLOW}`: if these are two jobs, give each" in here
    assert not desk.cautions("b")


def test_first_node_is_warned_of_only_one_other_command() -> None:
    desk = job_with_spare()
    desk.start("d", FAST)
    desk.start("e", "train.py --lr 0.3")

    assert [1, 1, 1] == [len(desk.cautions(node)) for node in "ade"]


def test_spare_of_other_arguments_fails_when_the_job_succeeds_without_it() -> None:
    desk = job_with_spare()
    for node in "ab":
        desk.receive(Succeeded(node, 0))

    first, spare = desk.last("a"), desk.last("c")
    assert isinstance(first, Final) and first.succeeded
    assert isinstance(spare, Final) and not spare.succeeded
    assert "without node c, which has other arguments and ran nothing: give each job its own id" in spare.why


def test_node_that_had_ranks_succeeds_with_any_arguments() -> None:
    desk = Commands(1, 2)
    desk.start("a", SLOW)
    desk.start("b", FAST)
    desk.start("a", SLOW, last_round=0)
    for node in "ab":
        desk.receive(Succeeded(node, 1))

    final = desk.last("b")
    assert isinstance(final, Final) and final.succeeded
    assert any(isinstance(notice, RankAssignment) for notice in desk.notices("b"))


def test_nodes_of_another_role_are_not_compared() -> None:
    desk = Commands(2, 2)
    desk.start("a", SLOW)
    desk.start("b", FAST, role="reader")

    assert not desk.cautions("a") and not desk.cautions("b")


def test_next_coordinator_knows_the_commands_and_whom_they_cost_success() -> None:
    state = job_with_spare().state
    copy = decode_state(encode_state(state, 2.0), 2.0)

    assert state == copy
    assert [True] == [entry.is_other for entry in copy.waiting.values()]


def test_state_of_an_earlier_coordinator_has_no_commands() -> None:
    body = json.loads(encode_state(job_with_spare().state, 2.0))
    del body["commands"], body["others"]
    for row in (*body["waiting"], *body["round"]["entries"]):
        del row[-2:]

    copy = decode_state(json.dumps(body).encode(), 2.0)

    assert copy.round is not None
    assert {""} == {entry.descriptor.command for entry in (*copy.round.entries.values(), *copy.waiting.values())}
