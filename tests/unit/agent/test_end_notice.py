"""`EndNotice`: the time that an announcement leaves."""

from __future__ import annotations

import pytest

from elasticlib.agent import EndNotice

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
