"""
Which heartbeats of the nodes of a round the coordinator has read, as short as can be: it says so in each of its own.
Pure.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from attrs import frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._codec import Code

_DIGITS = string.ascii_letters + string.digits + "+/"


@frozen
class HeartbeatsRead:
    """Of each node of a round, in the order of group ranks: the count of the last heartbeat that was read."""

    round: int
    last: Code
    """A digit each, base 64: the count modulo 64. Any other character: none was, or the node has left."""

    @classmethod
    def of(cls, round: int, counts: Iterable[int]) -> Self:
        """What says that those were read; 0: none was."""
        return cls(round, "".join(_DIGITS[count % len(_DIGITS)] if count else "." for count in counts))

    def count(self, group_rank: int, least: int) -> int:
        """That of the group rank, which is not below *least*; -1: none was read."""
        place = _DIGITS.find(self.last[group_rank : group_rank + 1] or ".")
        return -1 if place < 0 else least + (place - least) % len(_DIGITS)
