"""
The lines that many workers write at once, and what has become of them on the console.

Rules of this file: the standard library only, for the workers import it; nothing here knows who made the console.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_WORD = "x" * 40
_WHOLE = re.compile(rb"\[default(\d+)\]:(\d+) (\d{6}) x{40} end\n")


class Count(NamedTuple):
    """Differences between a console and the written lines."""

    torn: int
    """Lines that are no worker's whole line with its prefix."""
    lost: int
    """Written lines that are nowhere whole."""
    repeated: int


def parts(rank: int, number: int) -> tuple[str, str]:
    """Line *number* (below 1,000,000) of worker *rank*, in the two pieces in which it is written."""
    return f"{rank} {number:06d} ", f"{_WORD} end\n"


def count(console: Iterable[bytes], workers: int, lines: int) -> Count:
    """Compare the *console* with *lines* lines from each of *workers* workers."""
    seen = [bytearray(lines) for _ in range(workers)]
    torn = repeated = 0
    for line in console:
        found = _WHOLE.fullmatch(line)
        prefix, rank, number = (int(each) for each in found.groups()) if found else (-1, -1, -1)
        if prefix != rank or not 0 <= rank < workers or number >= lines:
            torn += 1
        elif seen[rank][number]:
            repeated += 1
        else:
            seen[rank][number] = 1
    lost = sum(each.count(0) for each in seen)
    return Count(torn, lost, repeated)
