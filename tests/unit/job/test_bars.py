"""Bars of several ranks in a cell: side by side, in place, in order, and limited in number."""

from __future__ import annotations

import pytest

from elasticlib.notebook import _displays
from elasticlib.notebook._displays import LINE_PERIOD, Bars, DisplayText
from elasticlib.notebook._marks import Bar


class Cell:
    """Shows what `Bars` tells, as a front end does."""

    def __init__(self, *, can_change: bool = True) -> None:
        self.bars = Bars("bars", can_change=can_change)
        self.outputs: list[str] = []
        self.places: dict[str, int] = {}
        self.updates = 0

    def take(self, rank: int, state: str, *, number: int = 1, is_last: bool = False, now: float = 0.0) -> None:
        for part in self.bars.take(Bar(f"[{rank}] ", number, state, is_last), now):
            self._show(part)

    def settle(self) -> list[str]:
        for part in self.bars.changes():
            self.updates += 1
            self._show(part)
        return self.outputs

    def _show(self, part: str | DisplayText) -> None:
        if isinstance(part, str):
            self.outputs.append(part)
        elif part.is_new:
            assert part.name not in self.places
            self.places[part.name] = len(self.outputs)
            self.outputs.append(part.text)
        else:
            self.outputs[self.places[part.name]] = part.text


def test_each_rank_has_a_line_which_is_replaced() -> None:
    cell = Cell()
    for state in ("0%", "50%"):
        for rank in (10, 0, 2):
            cell.take(rank, state)
        cell.settle()

    assert cell.settle() == ["[0] 50%\n[2] 50%\n[10] 50%"]


def test_all_that_changes_at_once_is_one_update() -> None:
    cell = Cell()
    for rank in range(8):
        cell.take(rank, "0%")
    cell.settle()
    for rank in range(8):
        cell.take(rank, "1%")
    cell.settle()
    cell.take(3, "1%")
    cell.settle()

    assert cell.updates == 2


def test_ended_bar_stays_and_the_next_one_has_its_own_place() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.take(rank, "1: 50%")
    cell.take(0, "1: 100%", is_last=True)
    cell.take(0, "2: 10%", number=2)
    cell.take(1, "1: 100%", is_last=True)
    cell.take(1, "2: 20%", number=2)

    assert cell.settle() == ["[0] 1: 100%\n[1] 1: 100%", "[0] 2: 10%\n[1] 2: 20%"]


def test_bars_that_begin_after_all_others_have_ended_begin_another_display() -> None:
    cell = Cell()
    cell.take(0, "100%")
    cell.take(0, "100%", is_last=True)
    cell.take(1, "0%")

    assert cell.settle() == ["[0] 100%", "[1] 0%"]


def test_nested_bars_of_a_rank_stand_below_each_other() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.take(rank, "outer", number=1)
        cell.take(rank, " inner", number=2)
    assert cell.settle() == ["[0] outer\n[0]  inner\n[1] outer\n[1]  inner"]

    cell.take(0, "", number=2)
    assert cell.settle() == ["[0] outer\n[1] outer\n[1]  inner"]
    cell.take(0, " again", number=2)
    assert cell.settle() == ["[0] outer\n[0]  again\n[1] outer\n[1]  inner"]
    cell.take(0, "", number=2, is_last=True)
    assert cell.settle() == ["[0] outer\n[1] outer\n[1]  inner"]


def test_the_end_of_a_bar_of_another_cell_is_a_line() -> None:
    cell = Cell()
    cell.take(0, "100%", is_last=True)
    cell.take(1, "", is_last=True)

    assert cell.settle() == ["[0] 100%\n"]


def test_colours_are_kept_and_cursor_moves_are_removed() -> None:
    cell = Cell()
    cell.take(0, "\x1b[32m5\x1b[0m\x1b[2K\x1b[?25l\x07 ")

    assert cell.settle() == ["[0] \x1b[32m5\x1b[0m"]


def test_a_cell_has_not_displays_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_displays, "_MOST_DISPLAYS", 2)
    cell = Cell()
    for number in range(5):
        for rank in (0, 1):
            cell.take(rank, f"bar {number}", number=number)
        for rank in (0, 1):
            cell.take(rank, f"bar {number}", number=number, is_last=True)
        cell.settle()

    assert [each for each in cell.outputs if not each.endswith("\n")] == [
        "[0] bar 0\n[1] bar 0",
        "[0] bar 4\n[1] bar 4",
    ]
    lines = [f"[{rank}] bar {number}\n" for number in (1, 2, 3) for rank in (0, 1)]
    assert [each for each in cell.outputs if each.endswith("\n")] == lines


def test_a_display_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_displays, "_MOST_ROWS", 3)
    cell = Cell()
    cell.take(0, "outer", number=0)
    for number in range(1, 6):
        cell.take(0, f"inner {number}", number=number)
        cell.take(0, f"inner {number}", number=number, is_last=True)

    assert cell.settle() == [
        "[0] outer\n[0] inner 4\n[0] inner 5",
        "[0] inner 1\n",
        "[0] inner 2\n",
        "[0] inner 3\n",
    ]


def test_bar_without_replacement_is_a_line_a_second_and_its_last_state() -> None:
    cell = Cell(can_change=False)
    for step in range(100):
        cell.take(0, f"{step}%", now=step * LINE_PERIOD / 40)
    cell.take(0, "100%", is_last=True)
    cell.take(1, "", is_last=True)

    assert cell.settle() == ["[0] 40%\n", "[0] 80%\n", "[0] 100%\n"]
