"""Rules of what the sidecar watches: its launcher's silence, and the time that workers have."""

from __future__ import annotations

import math

import pytest

from elasticlib.rendezvous.sidecar._launcher_watch import SILENCE, SidecarWatch

HEARTBEAT = 10.0
VIGIL = SidecarWatch(HEARTBEAT, 100.0, 100.0)
RUNNING = VIGIL.assigned()


def test_the_heartbeats_of_a_silent_launcher_rest_until_it_speaks() -> None:
    silent = VIGIL.judge(100.0 + SILENCE * HEARTBEAT, None)
    spoke = silent.after_message(102.0).judge(102.0, None)

    assert (False, True, False) == (VIGIL.judge(100.9, None).paused, silent.paused, spoke.paused)
    assert (101.5, None) == (VIGIL.wake_at(None), silent.wake_at(None))


def test_without_heartbeats_nobody_is_silent() -> None:
    alone = SidecarWatch(0.0, 100.0, 100.0)

    assert not alone.judge(1e6, None).paused
    assert alone.wake_at(None) is None


@pytest.mark.parametrize(("kill_at", "due"), [(None, False), (100.5, True), (100.6, False)])
def test_workers_must_be_dead_when_their_time_has_run_out(kill_at: float | None, due: bool) -> None:
    assert due is RUNNING.judge(100.5, kill_at).due
    assert not VIGIL.judge(100.5, kill_at).due


def test_verdict_on_workers_stays_after_contact_until_they_have_ended() -> None:
    """Others may have this node's ranks since."""
    due = RUNNING.judge(100.0, 99.0)

    assert due.judge(100.1, 200.0).due
    assert not due.gone().due
    assert not due.joins(2).due


def test_a_lease_ends_when_workers_must_be_dead_and_is_never_renewed_then() -> None:
    due = RUNNING.judge(108.5, 108.5)

    assert (108.5, math.inf, math.inf) == (RUNNING.lease_end(108.5), RUNNING.lease_end(None), VIGIL.lease_end(108.5))
    assert due.lease_end(120.0) is None


def test_signs_of_life_are_answered_from_time_to_time() -> None:
    early, first = VIGIL.answer(101.0)
    later, second = early.answer(101.5)
    _, third = later.answer(101.6)

    assert (False, True, False) == (first, second, third)


def test_watch_wakes_for_the_event_due_first() -> None:
    assert (100.5, 101.5) == (RUNNING.wake_at(100.5), RUNNING.wake_at(105.0))
