"""
What a worker writes down of its imports, in memory that it shares with its spawner, and what is made of it.

Rules of this file: the worker's program may write anywhere in its memory, so a line that cannot be understood is left
out; what does not fit is no reason to fail.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

ENDED = "its import ends the process"
TOOK_LONG = "its import takes too long"
BY_CHANCE = (ENDED, TOOK_LONG)
"""Reasons why something was not imported ahead that need not come again."""
_CAPACITY = 1 << 18
"""Bytes for what one worker imports: thousands of names."""
_HEAD = struct.Struct("<QB")
"""How many bytes of notes there are, and whether some did not fit."""
_UNDER_WAY = _HEAD.size
"""Where it stands whether an import is under way."""
_START = _UNDER_WAY + 1
"""Of the notes."""


@frozen
class Import:
    """One import of an installed module by a worker's program, or by what the program imports."""

    name: str
    origin: str
    """The file it came from."""
    changed: frozenset[str] = frozenset()
    """Variables that the program had set or removed before."""
    cost: int = 0
    """Milliseconds that it took."""

    def plain(self) -> list[Any]:
        """For a channel or a file."""
        return [self.name, self.origin, sorted(self.changed), self.cost]

    def joined(self, other: Import) -> Import:
        """With what is known of the same import by another worker, or of another run."""
        return Import(self.name, self.origin, self.changed | other.changed, max(self.cost, other.cost))

    @classmethod
    def of(cls, body: Any) -> Import:
        """What `plain` made. Raises `ValueError` for anything else."""
        match body:
            case [str(name), str(origin), list(changed), int(cost)] if all(isinstance(each, str) for each in changed):
                if all(part.isidentifier() for part in name.split(".")):
                    return cls(name, origin, frozenset(changed), cost)
        raise ValueError(f"{body!r} names no import")


def without(wanted: Sequence[Import], refused: Mapping[str, Sequence[Any]]) -> list[Import]:
    """
    What to import ahead of what is *wanted*: in place of a module that is refused, what it imports of other packages.

    Of a package of which anything is refused, nothing is imported in place of something else.
    """
    found = dict[str, Import]()
    packages = {name.partition(".")[0] for name in refused}
    left = list(reversed(wanted))
    known = set[str]()
    while left:
        each = left.pop()
        if each.name not in refused:
            found.setdefault(each.name, each)
        elif each.name not in known:
            known.add(each.name)
            instead = [Import.of(body) for body in reversed(refused[each.name][1])]
            left += [some for some in instead if some.name in refused or some.name.partition(".")[0] not in packages]
    return list(found.values())


class Notes:
    """Memory that a worker and its spawner share: what the worker has imported so far."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _START + _CAPACITY)
        self._end = 0

    def add(self, found: Import) -> None:
        """Note an import; one that does not fit any more is dropped, and `read` says so."""
        line = json.dumps(found.plain()).encode() + b"\n"
        start = self._end
        if start + len(line) > _CAPACITY:
            _HEAD.pack_into(self._memory, 0, start, 1)
            return
        self._end = start + len(line)
        self._memory[_START + start : _START + self._end] = line
        _HEAD.pack_into(self._memory, 0, self._end, 0)

    def set_busy(self, is_busy: bool) -> None:
        """Say whether an import is under way."""
        self._memory[_UNDER_WAY] = is_busy

    def busy(self) -> bool:
        """Whether an import is under way."""
        return bool(self._memory[_UNDER_WAY])

    def length(self) -> int:
        """How many bytes were noted."""
        return min(int(_HEAD.unpack_from(self._memory)[0]), _CAPACITY)

    def read(self) -> list[Import] | None:
        """What was noted, in order, without lines that cannot be understood; None where some did not fit."""
        if _HEAD.unpack_from(self._memory)[1]:
            return None
        found = []
        for line in self._memory[_START : _START + self.length()].splitlines():
            try:
                found.append(Import.of(json.loads(line)))
            except ValueError:  # the worker's program may have written anywhere in its memory
                continue
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
