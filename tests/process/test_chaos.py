"""A sample of `tests.benchmarks.chaos`: processes of a job are killed or paused, and it ends as it should."""

from __future__ import annotations

import pytest

from tests.benchmarks import asleep, chaos

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

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
