"""Assignment of ranks to nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.rendezvous.coordinator._rank_order import assign, natural_key, order
from elasticlib.rendezvous.protocol._messages import Descriptor


def offer(slots: int = 1, role: str = "trainer", index: int | None = None, port: int = 1000) -> Descriptor:
    return Descriptor(slots, role, ("10.0.0.1",), port, index)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["node10", "node2", "node1"], ["node1", "node2", "node10"]),
        (["b", "a"], ["a", "b"]),
        (["10", "9", "x"], ["9", "10", "x"]),
        (["rack2-node1", "rack1-node10", "rack1-node9"], ["rack1-node9", "rack1-node10", "rack2-node1"]),
        (["n01", "n1", "n2"], ["n01", "n1", "n2"]),
        (["n" + "9" * 5000, "n1"], ["n1", "n" + "9" * 5000]),
    ],
)
def test_names_sort_as_people_do(names: list[str], expected: list[str]) -> None:
    assert expected == sorted(names, key=natural_key)


@pytest.mark.parametrize(
    ("nodes", "last", "expected"),
    [
        ({"node10": None, "node2": None}, [], ["node2", "node10"]),
        ({"a": 2, "b": 0, "c": 1}, [], ["b", "c", "a"]),
        ({"a": None, "b": 7}, [], ["b", "a"]),
        ({"a": None, "b": None, "c": None}, ["c", "b"], ["c", "b", "a"]),
        ({"a": None, "c": None}, ["c", "b", "a"], ["c", "a"]),
        ({"a": 1, "b": 0}, ["a", "b"], ["b", "a"]),
        ({"b": 0, "a": 0}, ["b"], ["b", "a"]),
        ({"b": 0, "a": 0, "c": 0}, [], ["a", "b", "c"]),
        ({"main": 0, "w0": 0, "w1": 1, "w2": 2}, [], ["main", "w0", "w1", "w2"]),
    ],
)
def test_order_is_index_then_old_place_then_name(
    nodes: dict[str, int | None], last: list[str], expected: list[str]
) -> None:
    offers = {node: offer(index=index) for node, index in nodes.items()}

    assert expected == list(order(offers, last))


def test_host_of_the_store_is_first_among_nodes_without_an_index() -> None:
    host = Descriptor(1, "trainer", ("10.0.0.1",), 1000, hosts=True)

    assert ("z", "a", "b") == order({"a": offer(), "b": offer(), "z": host}, ["a", "b"])
    assert ("b", "z", "a") == order({"a": offer(), "b": offer(index=5), "z": host})


def test_index_that_all_nodes_share_does_not_order_them() -> None:
    """Each Job of a Kubernetes JobSet numbers its own pods from 0."""
    host = Descriptor(1, "trainer", ("10.0.0.1",), 1000, index=0, hosts=True)

    assert ("z", "a", "b") == order({"b": offer(index=0), "a": offer(index=0), "z": host})


def test_nodes_of_different_size_and_role_get_ranks_without_a_gap() -> None:
    offers = [offer(2, "trainer", port=1001), offer(3, "reader"), offer(4, "trainer")]

    assignments = assign(offers, round=5, restart_count=1, max_restarts=3, why="all are there")

    assert [0, 1, 2] == [assignment.group_rank for assignment in assignments]
    assert [0, 2, 5] == [assignment.rank_base for assignment in assignments]
    assert [0, 0, 2] == [assignment.role_rank_base for assignment in assignments]
    assert [6, 3, 6] == [assignment.role_world_size for assignment in assignments]
    assert {9} == {assignment.world_size for assignment in assignments}
    assert {3} == {assignment.group_world_size for assignment in assignments}


def test_all_nodes_learn_the_store_of_group_rank_0() -> None:
    first = Descriptor(1, "trainer", ("10.0.0.7", "fe80::7"), 4711)

    assignments = assign([first, offer()], round=0, restart_count=0, max_restarts=0, why="")

    assert {(("10.0.0.7", "fe80::7"), 4711)} == {
        (assignment.master_addresses, assignment.master_port) for assignment in assignments
    }


@given(st.lists(st.builds(offer, st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=12))
def test_ranks_of_world_and_roles_are_whole(offers: list[Descriptor]) -> None:
    assignments = assign(offers, round=0, restart_count=0, max_restarts=0, why="")

    ranks = [
        assignment.rank_base + i for assignment, own in zip(assignments, offers, strict=True) for i in range(own.slots)
    ]
    assert list(range(assignments[0].world_size)) == ranks
    for role in {own.role for own in offers}:
        mine = [
            (assignment, own.slots) for assignment, own in zip(assignments, offers, strict=True) if own.role == role
        ]
        role_ranks = [assignment.role_rank_base + i for assignment, slots in mine for i in range(slots)]
        assert list(range(mine[0][0].role_world_size)) == role_ranks
