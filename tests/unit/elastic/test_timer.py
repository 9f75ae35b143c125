"""torch's modules of timers, by their names, and what they hold."""

from __future__ import annotations

import importlib
import logging

import pytest

import elasticlib.timer
from elasticlib.timer._fifo import log_debug_info_for_expired_timers


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("api", "TimerRequest TimerClient RequestQueue TimerServer configure expires"),
        ("local_timer", "LocalTimerClient MultiprocessingRequestQueue LocalTimerServer"),
        ("file_based_local_timer", "FileTimerClient FileTimerRequest FileTimerServer"),
    ],
)
def test_a_door_leads_to_the_same_things(module: str, names: str) -> None:
    door = importlib.import_module(f"elasticlib.elastic.timer.{module}")

    assert sorted(names.split()) == sorted(door.__all__)
    assert [] == [name for name in names.split() if getattr(door, name) is not getattr(elasticlib.timer, name)]


def test_expired_timers_are_logged_with_their_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elasticlib")

    log_debug_info_for_expired_timers("night", {})
    log_debug_info_for_expired_timers("night", {7: ["step"]})

    assert ["job night: timers expired: {7: ['step']}"] == [record.message for record in caplog.records]
