"""A fixed, seeded sample of the campaigns in `tests.benchmarks`; whole campaigns are commands there."""

from __future__ import annotations

import pytest

from tests.benchmarks import kills, logs, recoveries
from tests.benchmarks.launchers import ELASTICLIB

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]


def test_jobs_recover_from_a_killed_worker() -> None:
    """Promise 1, row 120: two gloo ranks, one SIGKILLed, one restart."""
    campaign = recoveries.campaign(ELASTICLIB, jobs=4, seed=20)

    assert 0 == campaign.unfinished


@pytest.mark.parametrize("target", ["launcher", "reaper", "fork server", "spawner"])
def test_nothing_is_left_when_a_process_of_the_chain_is_killed(target: str) -> None:
    """Promise 7, row 113: at random moments, start included, with grandchildren in sessions of their own."""
    campaign = kills.campaign(ELASTICLIB, rounds=2, seed=20, chosen=(target,))

    assert (0, 0) == (campaign.failed, campaign.left)


def test_no_line_is_lost_or_torn() -> None:
    """Promise 8, rows 072, 074: lines written in two parts by four workers."""
    flood = logs.flood(ELASTICLIB, workers=4, lines=20_000)

    assert (0, 0) == (flood.count.torn, flood.count.lost)
