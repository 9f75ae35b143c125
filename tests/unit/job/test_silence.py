"""When a cell says that nothing comes: after long, seldom, and no longer than it is true."""

from __future__ import annotations

import pytest

from elasticlib.notebook._callers_stream import FIRST_REPORT, Silence, silence_text


class Cell:
    """Cell that records the reports of a `Silence`, and sets the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reported: list[float] = []
        self.is_reported = False
        self.silence = Silence(self.report, lambda: self.now)

    def report(self, seconds: float | None) -> None:
        self.is_reported = seconds is not None
        if seconds is not None:
            self.reported.append(seconds)

    def look_at(self, now: float) -> float | None:
        """The thread that shows output looks at that time."""
        self.now = now
        return self.silence.look()

    def output_at(self, now: float) -> None:
        self.now = now
        self.silence.note_output()


@pytest.fixture
def cell() -> Cell:
    cell = Cell()
    cell.silence.begin()
    return cell


def test_silence_is_reported_once_after_its_time_and_not_before(cell: Cell) -> None:
    assert 1.0 == cell.look_at(100 + FIRST_REPORT - 1)
    assert [] == cell.reported
    assert FIRST_REPORT == cell.look_at(100 + FIRST_REPORT)
    assert FIRST_REPORT - 1 == cell.look_at(100 + FIRST_REPORT + 1)
    assert [FIRST_REPORT] == cell.reported


def test_silence_is_reported_at_growing_intervals(cell: Cell) -> None:
    for second in range(100, 100 + 3600):
        cell.look_at(second)

    assert [20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0] == cell.reported


def test_output_takes_it_back_and_a_later_silence_is_to_be_longer(cell: Cell) -> None:
    cell.look_at(100 + FIRST_REPORT)
    before = cell.is_reported
    cell.output_at(131.0)

    assert (True, False) == (before, cell.is_reported)
    assert 2 * FIRST_REPORT == cell.look_at(131.0)


def test_program_that_writes_each_minute_is_reported_silent_twice(cell: Cell) -> None:
    for second in range(101, 100 + 3600):
        if second % 60 == 0:
            cell.output_at(second)
        cell.look_at(second)

    assert 2 == len(cell.reported)


def test_output_before_the_time_is_over_restarts_the_count(cell: Cell) -> None:
    cell.output_at(110.0)
    cell.look_at(100 + FIRST_REPORT)
    assert [] == cell.reported
    cell.look_at(110 + FIRST_REPORT)
    assert [FIRST_REPORT] == cell.reported


def test_restart_of_the_workers_does_not_count_as_output(cell: Cell) -> None:
    cell.now = 110.0
    cell.silence.begin()

    assert FIRST_REPORT - 10 == cell.look_at(110.0)


def test_silence_is_not_reported_while_no_caller_waits(cell: Cell) -> None:
    cell.silence.end()

    assert cell.look_at(1e9) is None
    cell.output_at(1e9)
    assert cell.look_at(2e9) is None
    assert [] == cell.reported


def test_the_end_takes_it_back(cell: Cell) -> None:
    cell.look_at(100 + FIRST_REPORT)
    cell.silence.end()

    assert not cell.is_reported


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        (None, "no rank has written anything"),
        ((0,), "rank 0 has written nothing"),
        ((0, 3), "ranks 0, 3 have written nothing"),
    ],
)
def test_silence_text_names_job_ranks_time_and_remedy(ranks: tuple[int, ...] | None, who: str) -> None:
    for kind, way in (("call", "interrupt"), ("started", "elasticlib.jobs()"), ("pool", "pool.job.stacks()")):
        text = silence_text("train", kind, ranks, 40.2)

        assert text.startswith(f"[job 'train' runs, but {who} for 40 s: ")
        assert way in text and "\n" not in text
    assert "for 10 min 40 s:" in silence_text("train", "call", ranks, 640.0)
