"""Progress that a worker reports: it is read from outside, even if the worker writes nonsense."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import ConfigError
from elasticlib.workers.child import _worker_progress
from elasticlib.workers.child._worker_progress import Board, attach, progress


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """Yield the progress board of two workers; this process is the second."""
    found = Board(2)
    monkeypatch.setattr(_worker_progress, "_slot", None)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    attach(os.dup(found.fileno()), 1)
    yield found
    found.close()


def test_progress_is_empty_at_first(board: Board) -> None:
    assert (board.read(0), board.read(1)) == (None, None)


def test_progress_of_a_worker_is_read_with_its_age(board: Board) -> None:
    progress(3, total=10, loss=0.5, lr=1e-3)

    reported = board.read(1)
    assert reported is not None
    assert (reported.step, reported.total, reported.metrics) == (3, 10, {"loss": 0.5, "lr": 1e-3})
    assert 0 <= reported.age < 60
    assert board.read(0) is None


def test_a_step_alone_will_do(board: Board) -> None:
    progress(0)

    reported = board.read(1)
    assert reported is not None
    assert (reported.step, reported.total, reported.metrics) == (0, None, {})


def test_other_metrics_take_the_place_of_the_former_ones(board: Board) -> None:
    progress(1, loss=1.0, lr=2.0)
    progress(2, accuracy=3.0)
    reported = board.read(1)
    progress(3)
    bare = board.read(1)

    assert reported is not None and reported.metrics == {"accuracy": 3.0}
    assert bare is not None and bare.metrics == {}


def test_numbers_of_any_kind_are_metrics(board: Board) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 2.5

    progress(1, loss=Scalar(), done=True, count=4)  # type: ignore[arg-type]

    reported = board.read(1)
    assert reported is not None and reported.metrics == {"loss": 2.5, "done": 1.0, "count": 4.0}


@pytest.mark.parametrize(
    ("args", "metrics"),
    [(("one",), {}), ((1.5,), {}), ((1, "two"), {}), ((1,), {"loss": "low"}), ((2**70,), {}), ((None,), {})],
)
def test_invalid_number_is_refused_by_name(board: Board, args: tuple[Any, ...], metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"progress\(.*whole\s+numbers"):
        progress(*args, **metrics)


def test_too_many_metrics_are_refused(board: Board) -> None:
    with pytest.raises(ConfigError, match="33 metrics"):
        progress(1, **{f"m{index}": 0.0 for index in range(33)})


def test_new_round_starts_without_progress(board: Board) -> None:
    progress(5, loss=1.0)
    board.clear()

    assert board.read(1) is None


def test_outside_a_job_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker_progress, "_slot", None)

    progress(1, total=2, loss="not even a number")  # type: ignore[arg-type]


@given(st.binary(min_size=0, max_size=400), st.integers(0, 2048))
def test_a_worker_may_write_anything_there(junk: bytes, place: int) -> None:
    board = Board(1)
    end = min(place + len(junk), len(board._memory))
    board._memory[place:end] = junk[: end - place]

    reported = board.read(0)
    assert reported is None or (reported.age >= 0 and all(isinstance(name, str) for name in reported.metrics))
    board.close()


@pytest.mark.parametrize("when", [math.nan, math.inf, -1.0])
def test_progress_with_an_invalid_time_counts_as_never_reported(board: Board, when: float) -> None:
    _worker_progress._HEAD.pack_into(board._memory, 0, 1, 2, when, 0, 0)

    assert board.read(0) is None


def test_progress_is_read_after_the_descriptor_is_closed(board: Board) -> None:
    progress(7)
    board.close()
    board.close()

    reported = board.read(1)
    assert reported is not None and reported.step == 7
