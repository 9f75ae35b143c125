"""Ranks in words."""

from __future__ import annotations

import pytest

from elasticlib.stacks import number_ranges, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        ([5, 5], "rank 5"),
        (range(1000), "ranks 0-999"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "ranks 0, 2, 4 ... 16 (9 ranks)"),
    ],
)
def test_neighbours_stand_as_a_range(ranks: list[int], text: str) -> None:
    assert text == ranks_text(ranks)


def test_ranks_have_the_noun_that_is_given() -> None:
    assert ("local rank 0", "local ranks 0, 2") == (ranks_text([0], "local rank"), ranks_text([0, 2], "local rank"))


def test_numbers_alone_are_written_as_the_kernel_does() -> None:
    assert ("", "0-3,8") == (number_ranges([]), number_ranges([8, 3, 2, 1, 0], ","))
