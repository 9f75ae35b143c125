"""
Functions that close the descriptors of this process.

Rules of this file: the standard library only, since the reaper imports it. The time does not grow
with the limit of open files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable

_LOW = 256
"""Descriptors below this number are closed without checking which ones are open."""


def close_each(descriptors: Iterable[int]) -> None:
    """Close all of *descriptors*, which must be open."""
    for descriptor in descriptors:
        os.close(descriptor)


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor of this process that is not in *keep*, at any limit of open files."""
    # The lowest ones without a check: that makes room for the listing if the limit leaves none.
    lowest_kept = sorted(number for number in keep if number < _LOW)
    bounds = [-1, *lowest_kept, _LOW]
    for before, after in itertools.pairwise(bounds):
        # The interpreter takes an empty range that ends below 0 for all descriptors.
        if before + 1 < after:
            # It ignores numbers that are not open.
            os.closerange(before + 1, after)

    try:
        numbers = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        # /proc is not mounted.
        _close_high_but(keep)
        return

    others = numbers.difference(keep)
    for number in others:
        # `os.close` would raise for the descriptor of the listing, which is closed by now.
        os.closerange(number, number + 1)


def _close_high_but(keep: Collection[int]) -> None:
    """Close without a listing: without a kernel call for ranges, the time grows with the limit."""
    kept = sorted({*keep, _LOW - 1})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)
