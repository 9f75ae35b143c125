"""
What a simulated store was asked to do, in numbers.

Rules of this file: counting only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, define


@define(eq=False, repr=False)
class Use:
    """What the store was asked to do: calls, the keys and entries they touched, and bytes if they are counted."""

    calls: Counter[str] = Factory(Counter)
    touched: int = 0
    bytes: int = 0
    longest: Counter[str] = Factory(Counter)
    """By kind of call, the bytes of the longest value."""

    def count(self, kind: str, arguments: Sequence[Any], values: Mapping[str, Any]) -> None:
        """One call more, to a store that holds *values*."""
        self.calls[kind] += 1
        if kind == "write":
            written: Mapping[str, Any] = arguments[0]
            self.touched += len(written)
            self.bytes += sum(len(key) + len(value) for key, value in written.items())
        elif kind in ("read", "delete", "discard"):
            self.touched += len(arguments[0])
            found = [values.get(key) or b"" for key in arguments[0]] if kind == "read" else []
            self.bytes += sum(len(str(key)) for key in arguments[0]) + sum(
                len(each) for each in found if each is not None
            )
        elif kind != "receive":
            self.touched += 1
            first = arguments[0] if arguments else None
            self.bytes += size_of(kind, arguments) or (len(first) if isinstance(first, str) else 0)


def size_of(kind: str, arguments: Sequence[Any]) -> int:
    """Bytes of the largest value that the call writes."""
    if kind == "write":
        return max(map(len, arguments[0].values()), default=0)
    if kind == "save":
        return len(arguments[1].data)
    return len(arguments[0]) if kind == "post" else 0
