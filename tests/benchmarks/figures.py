"""
Figures of the comparison, their goals, and the way to combine turns.

Rules of this file: pure; a smaller value of a figure is better. The ratio is the median of the
turns' own ratios, because the two runs of a turn saw the same machine.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from attrs import field, frozen

from tests.benchmarks.launchers import Launcher


class Of(enum.Enum):
    """Quantity that a goal limits."""

    VALUE = "value"
    RATIO = "ratio"


@frozen
class Goal:
    """The most that elasticlib may need."""

    most: float
    of: Of = Of.VALUE
    strict: bool = False
    """The bound itself is too much."""

    def reached(self, value: float | None, ratio: float | None) -> bool | None:
        """Return whether the goal is reached; None if its quantity was not measured."""
        bounded = value if self.of is Of.VALUE else ratio
        if bounded is None:
            return None
        return bounded < self.most if self.strict else bounded <= self.most

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"{sign} {self.most:g}{'x' if self.of is Of.RATIO else ''}"


@frozen
class Figure:
    """One line of the table."""

    promise: int | None
    """The number of the product's promise that it measures, if it is one of them."""
    label: str
    unit: str
    key: str
    """The attribute of the room's result that holds it."""
    goals: tuple[Goal, ...] = ()
    against: str | None = None
    """The attribute of the other launcher's result, where that is not the same."""
    fold: Callable[[Sequence[float]], float] = statistics.median
    """Makes one value of the turns' values: the median, or the sum where things are counted."""


@frozen
class Turn:
    """One pair of runs."""

    number: int
    seed: int
    quick: bool = False
    """Do less of what is done many times over; the figures of single jobs stay as they are."""


@frozen
class Benchmark:
    """A room of this house: what runs once per launcher and turn, and the figures that it yields."""

    name: str
    run: Callable[[Launcher, Turn], Any]
    figures: tuple[Figure, ...]

    def measures(self, promises: frozenset[int]) -> bool:
        """Return whether one of its figures belongs to *promises*."""
        return any(figure.promise in promises for figure in self.figures)


@frozen
class Line:
    """A figure with its values."""

    figure: Figure
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    """Values by turn; empty where the launcher has nothing of the kind."""
    ratio: float | None = field(init=False)
    """None for what is counted."""

    @ratio.default
    def _ratio(self) -> float | None:
        if self.figure.fold is not statistics.median:
            return None
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=False) if theirs]
        return statistics.median(ratios) if ratios else None

    @property
    def our_value(self) -> float | None:
        """The first launcher's value over all turns."""
        return self.figure.fold(self.ours) if self.ours else None

    @property
    def their_value(self) -> float | None:
        """The second launcher's value over all turns."""
        return self.figure.fold(self.theirs) if self.theirs else None

    @property
    def reached(self) -> bool | None:
        """Return False if a goal was missed, None without goals or if one was not measured, else True."""
        verdicts = [goal.reached(self.our_value, self.ratio) for goal in self.figure.goals]
        if False in verdicts:
            return False
        return None if None in verdicts or not verdicts else True


def compare(figure: Figure, ours: Sequence[object], theirs: Sequence[object]) -> Line:
    """Take the figure's values out of the results that both launchers gave, turn by turn."""

    def values(results: Sequence[object], key: str) -> tuple[float, ...]:
        found = (getattr(result, key) for result in results)
        return tuple(float(value) for value in found if value is not None)

    return Line(figure, values(ours, figure.key), values(theirs, figure.against or figure.key))
