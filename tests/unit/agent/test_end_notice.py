"""`EndNotice`: the time that an announcement leaves. `UnheardNotice`: one that comes before workers ask."""

from __future__ import annotations

import pytest
from attrs import evolve

from elasticlib.agent import EndNotice
from elasticlib.agent._end_notice import UnheardNotice
from elasticlib.agent._policy import StopRequested

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("left", "grace"),
    [
        (90.0, 90.0),
        # SIGTERM follows, and has a time of its own.
        (20.0, None),
        (0.0, None),
        (-5.0, None),
        # A person sends it so early.
        (3601.0, None),
    ],
)
def test_a_notice_leaves_the_time_until_the_end(left: float, grace: float | None) -> None:
    assert grace == EndNotice(end_time=NOW + left).grace(NOW, 25.0)


def test_without_an_end_it_leaves_the_shutdown_timeout() -> None:
    assert EndNotice().grace(NOW, 25.0) is None


REQUEST = StopRequested(15, "the machine is reclaimed", grace=30.0, is_notice=True)


@pytest.mark.parametrize(
    ("grace", "left"),
    [
        (30.0, 20.0),
        (None, None),
        # The end was announced wrongly: the usual time is left.
        (10.0, None),
    ],
)
def test_an_unheard_notice_is_taken_once_with_the_time_left(grace: float | None, left: float | None) -> None:
    unheard = UnheardNotice()
    unheard.keep(evolve(REQUEST, grace=grace), 100.0)

    assert evolve(REQUEST, grace=left) == unheard.take(110.0)
    assert unheard.take(110.0) is None and unheard.poll_timeout() is None


def test_of_two_unheard_notices_the_later_counts() -> None:
    unheard = UnheardNotice()
    unheard.keep(REQUEST, 100.0)
    unheard.keep(evolve(REQUEST, reason="time is over"), 101.0)

    found = unheard.take(102.0)
    assert found is not None and "time is over" == found.reason
