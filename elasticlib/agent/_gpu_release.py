"""
When the GPUs' memory of workers that ended is free again, so that the next ones can have it. Pure.

A process that was killed is gone before its driver has given back what it held, so workers that start at once may run
out of memory that nobody uses. Memory is in bytes, by a GPU's name; time is in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TOLERANCE = 512 * 2**20
"""Bytes that a GPU may hold beyond what it held before: less than one CUDA context of those that workers make."""
LIMIT = 30.0
"""Seconds of waiting: drivers take some for the memory of a large GPU, and longer than that only where they hang."""
_FIRST, _LONGEST = 0.02, 0.2
"""Seconds between two readings: the first pause, which each one doubles, and the longest."""


class Release:
    """
    One wait for memory, of at most *limit* seconds from *began* on, until no GPU holds more than *before*.

    What is not told of a GPU, before or now, is not waited for.
    """

    def __init__(self, before: Mapping[str, int], began: float, limit: float) -> None:
        self._before = before
        self._began = began
        self._ends = began + limit
        self._pause = _FIRST

    def held(self, used: Mapping[str, int]) -> dict[str, int]:
        """Bytes that each GPU still holds beyond what it held before, of those where that is too many."""
        more = {gpu: used[gpu] - self._before[gpu] for gpu in used.keys() & self._before.keys()}
        return {gpu: more[gpu] for gpu in sorted(more) if more[gpu] > TOLERANCE}

    def waited(self, now: float) -> float:
        """Seconds since it began."""
        return now - self._began

    def left(self, now: float) -> float:
        """Seconds that may still be waited."""
        return max(0.0, self._ends - now)

    def pause(self, now: float) -> float:
        """Seconds until the next reading, after one that was not enough: each time twice as many."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        return min(pause, self.left(now))


def visible(listed: str | None, names: Sequence[str]) -> list[int]:
    """
    Which of the GPUs *names* (their UUIDs, by index) a CUDA_VISIBLE_DEVICES of *listed* shows; None shows all.

    As CUDA reads it: numbers, or beginnings of UUIDs, up to the first entry that is neither. A part of a GPU (MIG) is
    taken for none.
    """
    if listed is None:
        return list(range(len(names)))
    found: list[int] = []
    for word in (each.strip() for each in listed.split(",")):
        fitting = [index for index, name in enumerate(names) if word and name.startswith(word)]
        if word.isascii() and word.isdecimal() and int(word) < len(names):
            found.append(int(word))
        elif len(fitting) == 1:
            found.append(fitting[0])
        else:
            break
    return sorted(set(found))
