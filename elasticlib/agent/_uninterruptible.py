"""
Which workers sleep where no signal reaches them, and for how long. PURE.

Rules of this file: a worker counts only as long as it was in state D at every look; one look at which it was not, or
was gone, and the time begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def look(since: Mapping[int, float], asleep: Iterable[int], now: float) -> dict[int, float]:
    """By process id, since when those sleep that are found *asleep* now; *since* is what the last look gave."""
    return {pid: since.get(pid, now) for pid in asleep}


def overdue(since: Mapping[int, float], allowed: float, now: float) -> dict[int, float]:
    """By process id, the seconds of those that have slept for *allowed* seconds or more."""
    return {pid: now - begun for pid, begun in since.items() if now - begun >= allowed}


def allowed_time(argument: float | None, text: str | None) -> float:
    """
    Seconds that a worker may sleep so; 0 for any time.

    A given *argument* beats the *text* of the environment; what is no number, or not above 0, means 0.
    """
    seconds = number(argument if argument is not None else text or 0)
    return max(0.0, seconds or 0.0)


def number(value: object) -> float | None:
    """*value* as a number of seconds, of either sign; None where it is none."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(seconds) else seconds
