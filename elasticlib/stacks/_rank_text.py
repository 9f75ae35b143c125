"""
Ranks in words. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

_MOST_RANGES = 8
"""Maximum number of ranges in a text; of more, it names the first three and the last number."""


def ranks_text(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return ``rank 3``, ``ranks 0-2, 5``, or for many ranges ``ranks 0, 2, 4 ... 98 (50 ranks)``."""
    every = sorted(set(ranks))
    nouns = noun if len(every) == 1 else f"{noun}s"
    ranges = _ranges(every)
    if len(ranges) > _MOST_RANGES:
        return f"{nouns} {', '.join(ranges[:3])} ... {every[-1]} ({len(every)} {nouns})"
    return f"{nouns} {', '.join(ranges)}"


def number_ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Return *numbers* in order, such as ``0-2, 5``; empty for none."""
    return between.join(_ranges(sorted(set(numbers))))


def _ranges(numbers: list[int]) -> list[str]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
