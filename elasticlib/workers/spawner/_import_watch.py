"""
What the workers of a round have imported, once they import nothing more: looked at from outside, in shared memory.

Rules of this file: time is an argument; looks get rarer as long as nothing new is seen; what one worker alone imports
is of no interest, since what is learned serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticlib.workers.child._import_notes import Import, Notes

_QUIET = 1.0
"""Seconds without a new import after which the imports are over, for the time being."""
_RAREST = 30.0
"""Seconds between looks at workers that have not imported anything for long."""


class ImportWatch:
    """The notes of one round's workers."""

    def __init__(self) -> None:
        self._notes: dict[int, Notes] = {}
        self._seen = 0
        """Bytes at the last look."""
        self._told = 0
        """Bytes of which the launcher knows."""
        self._wait = _QUIET
        self.next_look: float | None = None

    def begin(self) -> None:
        """Forget the round before."""
        for notes in self._notes.values():
            notes.close()
        self._notes = {}
        self._seen = self._told = 0
        self._wait = _QUIET
        self.next_look = None

    def open(self, local_rank: int, now: float) -> Notes:
        """Memory for the notes of a worker that is about to be started."""
        notes = self._notes[local_rank] = Notes()
        self.next_look = now + self._wait
        return notes

    def look(self, now: float) -> list[Import] | None:
        """What all workers have imported, in order, where that is news and no import is under way."""
        size = sum(notes.length() for notes in self._notes.values())
        is_quiet = size == self._seen and not any(notes.busy() for notes in self._notes.values())
        self._wait = min(2 * self._wait, _RAREST) if is_quiet and size == self._told else _QUIET
        self._seen = size
        self.next_look = now + self._wait
        return self.found() if is_quiet and size != self._told else None

    def found(self) -> list[Import] | None:
        """What all workers have imported, in the order of the lowest rank; None where that is not known."""
        self._told = self._seen = sum(notes.length() for notes in self._notes.values())
        by_rank = [self._notes[rank].read() for rank in sorted(self._notes)]
        return common([each for each in by_rank if each is not None]) if by_rank and None not in by_rank else None


def common(by_rank: Sequence[Sequence[Import]]) -> list[Import]:
    """What is in all of these, from the same file, in the order of the first; any rank's variable counts as changed."""
    kept = {each.name: each for each in reversed(by_rank[0])}  # the first of one that was imported twice
    for imports in by_rank:
        others = {each.name: each for each in reversed(imports)}
        kept = {
            name: each.joined(others[name])
            for name, each in kept.items()
            if name in others and others[name].origin == each.origin
        }
    order = {each.name: number for number, each in reversed(list(enumerate(by_rank[0])))}
    return sorted(kept.values(), key=lambda each: order[each.name])
