"""
The last heartbeats of a round's nodes that the coordinator has read, in a short form. Pure.

The coordinator includes them in each of its own heartbeats.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from attrs import frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._codec import Code

_DIGITS = string.ascii_letters + string.digits + "+/"
REPORT_MODULO = len(_DIGITS) ** 2
_NONE = ".."


@frozen
class HeartbeatsRead:
    """
    Counts of the last heartbeats that were read, one for each node of a round, in the order of
    group ranks.
    """

    round: int
    last: Code
    """Two digits each, base 64: the count modulo 4096. Any other characters: none was, or the node has left."""

    @classmethod
    def of(cls, round: int, counts: Iterable[int]) -> Self:
        """Return the object that reports those *counts* as read; 0: none was read."""
        return cls(round, "".join(map(_digits, counts)))

    def count(self, group_rank: int, least: int) -> int:
        """Return the count of *group_rank*, which is at least *least*; -1: none was read."""
        place = 2 * group_rank
        digits = (self.last[place : place + 2] + _NONE)[:2]  # a peer's text may be too short
        high, low = map(_DIGITS.find, digits)
        if high < 0 or low < 0:
            return -1
        remainder = high * len(_DIGITS) + low
        # Only the remainder is sent: the node knows the lowest possible count, as counts never
        # decrease.
        return least + (remainder - least) % REPORT_MODULO


def _digits(count: int) -> str:
    if not count:
        return _NONE
    # Two characters a node: with thousands of nodes every heartbeat of the coordinator has them all.
    high, low = divmod(count % REPORT_MODULO, len(_DIGITS))
    return _DIGITS[high] + _DIGITS[low]
