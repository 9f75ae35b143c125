"""Forecasts of a few schedules whose end is obvious."""

from __future__ import annotations

import pytest

from elasticlib.testing import FailWorker, Fault, Join, Kill, Leave
from tests.benchmarks.forecast import Draft, Forecast, foretell


def _foretold(backend: str, *faults: Fault) -> Forecast:
    return foretell(Draft(backend, nodes=3, min_nodes=2, max_restarts=1, steps=3), faults, seed=0)


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_a_newcomer_makes_good_for_a_lost_node(backend: str) -> None:
    found = _foretold(backend, Kill(1, 6.0), Join(4, 12.0))

    assert Forecast(3, 0, (0, 2, 4), found.settled, ((0, 0), (1, -9), (2, 0), (4, 0))) == found


def test_the_second_failure_is_one_too_many() -> None:
    found = _foretold("c10d", FailWorker(1, 6.0), FailWorker(2, 7.0))

    assert Forecast(0, 1, (), found.settled, ((0, 1), (1, 1), (2, 1))) == found


def test_the_end_of_the_host_is_the_end_of_all_in_c10d_alone() -> None:
    ended = _foretold("c10d", Leave(0, 6.0))
    goes_on = _foretold("etcd", Leave(0, 6.0))

    assert 0 == ended.world
    assert 2 == goes_on.world
