"""A fixed sample of the campaigns in `tests.benchmarks`, which are commands there: a job ends as it should."""

from __future__ import annotations

import pytest

from tests.benchmarks import asleep, chaos, kills, logs, recoveries
from tests.benchmarks.launchers import ELASTICLIB

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.24)]


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


UP = 1.0
"""Seconds about which the workers come up; each act is right at any moment."""


@pytest.mark.parametrize(
    ("kind", "part", "how", "phase"),
    [
        ("one node", "reaper", "kill", "start"),
        ("one node", "fork server", "kill", "start"),
        ("one node", "spawner", "kill", "start"),
        ("one node", "fork server", "kill", "training"),
        ("one node", "spawner", "kill", "training"),
        ("one node", "reaper", "pause", "training"),
        ("one node", "spawner", "pause", "end"),
        ("one node", "spawner", "stop", "training"),
        ("endpoint", "sidecar", "kill", "training"),
    ],
)
def test_job_ends_as_it_should_when_a_process_of_it_is_hit(kind: str, part: str, how: str, phase: str) -> None:
    outcome = chaos.perform(chaos.Act(kind, part, how, phase, 0.3), UP)

    assert "" == outcome.complaint, outcome.text


@pytest.mark.parametrize("how", ["whole", "one by one"])
def test_nothing_is_replaced_when_the_whole_job_is_stopped_for_a_while(how: str) -> None:
    complaint, text = asleep.perform(asleep.Sleep(how, "training", 0.5, 4.0), UP)

    assert "" == complaint, text
