"""
Counts and durations in words. Pure.
"""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return ``1 rank`` or ``3 ranks``; *nouns* is the plural if it is not *noun* plus *s*."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {nouns or f'{noun}s'}"


def duration(seconds: float, digits: int = 0) -> str:
    """Return ``12 s``, ``2 min 5 s`` or ``1 h 7 min``; *digits* are decimals below one minute."""
    if round(seconds, digits) < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
