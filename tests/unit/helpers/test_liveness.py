"""When a helper that stands still is woken or replaced, and that nothing is because the job slept."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elasticlib.helpers._helper_liveness import (
    LOOK,
    REPLACE_AFTER,
    WAKE_AFTER,
    AwakeTime,
    HelperAction,
    HelperLook,
    Liveness,
)

STOPPED, TRACED, ASLEEP = HelperLook("T"), HelperLook("t"), HelperLook("S", turns=7, owes=True)


def acts(
    looks: Iterable[HelperLook], *, passed: float | None = LOOK, alone: bool = True
) -> list[tuple[float, HelperAction]]:
    """Return the actions on a helper with these *looks*, each with its time in seconds."""
    liveness, found = Liveness(), []
    for number, look in enumerate(looks, 1):
        liveness, act = liveness.step(look, passed, alone)
        if act is not None:
            found.append((number * LOOK, act))
    return found


@pytest.mark.parametrize(
    ("looks", "passed", "alone"),
    [
        pytest.param(60 * [STOPPED], LOOK, False, id="stopped together with workers"),
        pytest.param(60 * [HelperLook("R", turns=7, owes=True)], LOOK, True, id="runs"),
        pytest.param(60 * [HelperLook("D", turns=7, owes=True)], LOOK, True, id="waits for a disk"),
        # Such as at load 30, or in an import that holds the interpreter's lock.
        pytest.param(
            [HelperLook("S", turns, owes=True) for turns in range(60)], LOOK, True, id="gets the CPU at times"
        ),
        pytest.param(60 * [HelperLook("S")], LOOK, True, id="sleeps and owes no answer"),
        pytest.param(60 * [STOPPED], None, True, id="stopped, this process is not awake"),
        pytest.param(60 * [TRACED], None, True, id="traced, this process is not awake"),
        pytest.param(60 * [ASLEEP], None, True, id="silent, this process is not awake"),
    ],
)
def test_a_helper_is_left_alone(looks: list[HelperLook], passed: float | None, alone: bool) -> None:
    assert [] == acts(looks, passed=passed, alone=alone)


def test_a_helper_that_was_stopped_alone_is_woken_once_and_then_replaced() -> None:
    assert [(6.0, HelperAction.WAKE), (30.0, HelperAction.REPLACE)] == acts(60 * [STOPPED])
    assert 6.0 - WAKE_AFTER < LOOK and REPLACE_AFTER == 30.0


def test_a_helper_that_is_stopped_again_after_it_went_on_is_woken_again() -> None:
    looks = [*(4 * [STOPPED]), HelperLook("S"), *(4 * [STOPPED])]

    assert [HelperAction.WAKE, HelperAction.WAKE] == [act for _, act in acts(looks)]


def test_a_helper_that_a_debugger_holds_is_reported_once_and_left_alone() -> None:
    assert [(6.0, HelperAction.REPORT_DEBUGGER)] == acts(60 * [TRACED])


def test_a_helper_that_sleeps_and_does_not_answer_is_replaced() -> None:
    """The first look tells only how many turns it has had."""
    assert [(32.0, HelperAction.REPLACE)] == acts(60 * [ASLEEP])


def test_observations_from_before_this_process_slept_do_not_count() -> None:
    liveness = Liveness()
    for _ in range(14):
        liveness, _ = liveness.step(STOPPED, LOOK, alone=True)

    liveness, first = liveness.step(STOPPED, None, alone=True)
    liveness, second = liveness.step(STOPPED, LOOK, alone=True)

    assert (None, None) == (first, second)


@pytest.mark.parametrize(("now", "passed"), [(2.0, 2.0), (3.4, 3.4), (3.6, None), (3600.0, None)])
def test_time_in_which_this_process_did_not_run_does_not_count(now: float, passed: float | None) -> None:
    awake, first = AwakeTime().look(0.0)

    assert (None, passed) == (first, awake.look(now)[1])
