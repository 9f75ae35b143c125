"""When a cell says that nothing comes: after long, seldom, and no longer than it is true."""

from __future__ import annotations

import pytest

from elasticlib.job._silence import FIRST, Silence, words


@pytest.fixture
def silence() -> Silence:
    silence = Silence()
    silence.begin(100.0)
    return silence


def test_it_is_said_once_the_time_is_over_and_not_before(silence: Silence) -> None:
    assert silence.due == 100 + FIRST
    assert silence.tick(100 + FIRST - 1) is None
    assert silence.tick(100 + FIRST) == FIRST
    assert silence.tick(100 + FIRST + 1) is None


def test_it_is_said_more_and_more_seldom(silence: Silence) -> None:
    said = [second for second in range(100, 100 + 3600) if silence.tick(second) is not None]

    assert said == [100 + FIRST * 2**power for power in range(8)]


def test_output_takes_it_back_and_a_later_silence_is_to_be_longer(silence: Silence) -> None:
    silence.tick(100 + FIRST)

    assert silence.heard(130.0)
    assert not silence.heard(131.0)
    assert silence.due == 131 + 2 * FIRST


def test_a_program_that_writes_now_and_then_is_left_alone() -> None:
    silence = Silence()
    silence.begin(0.0)
    said = 0
    for second in range(10_000):
        if second % 60 == 59:
            silence.heard(second)
        said += silence.tick(second) is not None

    assert said == 2


def test_output_before_its_time_is_over_counts_anew(silence: Silence) -> None:
    assert not silence.heard(110.0)
    assert silence.tick(100 + FIRST) is None
    assert silence.tick(110 + FIRST) == FIRST


def test_a_restart_of_the_workers_is_no_output(silence: Silence) -> None:
    silence.begin(110.0)

    assert silence.due == 100 + FIRST


def test_nobody_is_told_while_nobody_waits(silence: Silence) -> None:
    assert not silence.end()
    assert silence.due is None
    assert silence.tick(1e9) is None
    assert not silence.heard(1e9)
    assert silence.due is None


def test_the_end_takes_it_back(silence: Silence) -> None:
    silence.tick(100 + FIRST)

    assert silence.end()
    assert not silence.end()


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        (None, "no rank has written anything"),
        ((0,), "rank 0 has written nothing"),
        ((0, 3), "ranks 0, 3 have written nothing"),
    ],
)
def test_it_names_the_job_the_ranks_the_time_and_what_to_do(ranks: tuple[int, ...] | None, who: str) -> None:
    for kind, way in (("call", "interrupt"), ("started", "elasticlib.jobs()"), ("pool", "pool.job.stacks()")):
        text = words("train", kind, ranks, 40.2)

        assert text.startswith(f"[job 'train' runs, but {who} for 40 s: ")
        assert way in text and "\n" not in text
    assert "for 11 min:" in words("train", "call", ranks, 640.0)
