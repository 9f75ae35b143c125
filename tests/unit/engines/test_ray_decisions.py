"""Notices of draining nodes, and the warning while no agent starts, without a Ray cluster."""

from __future__ import annotations

import pytest

from elasticlib.engines._ray_decisions import DrainNotice, DrainWatch, waiting_text

NODES = {(0, 0): "a" * 56, (1, 0): "b" * 56, (1, 1): "c" * 56}
WHY_B, WHY_C = (f"Ray drains the node {letter * 12}" for letter in "bc")


@pytest.mark.parametrize(
    ("draining", "expected"),
    [
        ({}, []),
        ({"d" * 56: 0}, []),
        ({"b" * 56: 0}, [DrainNotice(1, 0, WHY_B, None)]),
        ({"b" * 56: 130_500}, [DrainNotice(1, 0, WHY_B, 30.5)]),
        ({"b" * 56: 90_000}, [DrainNotice(1, 0, WHY_B, 0.0)]),
        ({"b" * 56: 0, "c" * 56: 0}, [DrainNotice(1, 0, WHY_B, None), DrainNotice(1, 1, WHY_C, None)]),
    ],
    ids=["none", "another node", "no time", "time", "time is over", "two"],
)
def test_agents_of_draining_nodes_get_a_notice(draining: dict[str, int], expected: list[DrainNotice]) -> None:
    assert expected == DrainWatch().notices(NODES, draining, 100.0)


def test_agent_gets_one_notice_and_its_replacement_another() -> None:
    watch = DrainWatch()
    draining = {"b" * 56: 0, "c" * 56: 0}

    assert 1 == len(watch.notices({(1, 0): "b" * 56}, draining, 100.0))
    assert [] == watch.notices({(1, 0): "b" * 56}, draining, 101.0)
    assert [DrainNotice(1, 1, WHY_C, None)] == watch.notices(NODES, draining, 102.0)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", "not placed the agents after 10 s: each of the 2 bundles {'GPU': 8} needs a node of its own; "),
        ("RESCHEDULING", "free in the whole cluster: {'GPU': 4}"),
        ("CREATED", "placed the agents, and none of them has started after 10 s"),
    ],
)
def test_warning_states_whether_ray_or_the_start_is_late(state: str, expected: str) -> None:
    assert expected in waiting_text(state, [{"GPU": 8}] * 2, {"GPU": 4, "node:10.0.0.1": 1}, 10.0)
