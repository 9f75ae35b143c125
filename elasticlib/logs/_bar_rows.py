"""
The rows of a terminal that a stream with progress bars can still change, and its cursor.

Nested bars return to an upper one by "cursor up". So a row that has ended stays for a while:

    text --"\r"--> bar --newline--> ended bar --time is over, or too far above the cursor--> taken away
                    ^                   |
                    +--- cursor up -----+

A row that ends without a ``\r`` is an ordinary line. It is taken away once no bar is above it.

Rules of this file: pure; time is an argument. It makes no output.
"""

from __future__ import annotations

import math

from attrs import define, field

from elasticlib.logs._lines import overtype

BAR_PERIOD = 0.1
"""Seconds between two states of a bar, and seconds in which "cursor up" can return to an ended one."""
_MOST_ROWS = 8
"""Maximum number of rows to which "cursor up" can return; more nested bars are rare."""


@define
class BarRow:
    """A row of the terminal."""

    number: int
    text: bytearray = field(factory=bytearray)
    """Bytes since the last ``\\r``."""
    under: bytes | None = None
    """Text below `text`, which `text` overwrites; None before the first ``\\r``."""
    end: bytes = b"\n"
    ended_at: float = math.inf
    """Time of its newline, in seconds."""
    is_wiped: bool = False
    """True if a bar in this row had cleared itself before the present text."""
    shown: bytes | None = None
    """State that was output last; None if none was, so that it is still an ordinary line."""

    @property
    def was_rewritten(self) -> bool:
        """True if it is a bar, and no ordinary line."""
        return self.under is not None

    def state(self) -> bytes:
        """Return the text of the row as a terminal shows it."""
        return bytes(self.text) if self.under is None else overtype(self.under, bytes(self.text))

    def fold(self) -> None:
        """Return to the first column: the next text overwrites the row."""
        self.under = self.under or b""
        self.under = self.state()
        self.text.clear()

    def finish(self, newline: bytes, now: float) -> None:
        """Note the newline, after which only "cursor up" returns to the row."""
        self.end, self.ended_at = newline, now
        self.is_wiped = False
        if self.under is not None:
            self.is_wiped = self.under.isspace()
            self.fold()

    def is_settled(self, now: float) -> bool:
        """Return True for an ended row to which "cursor up" returns no more."""
        return not self.was_rewritten or now >= self.ended_at + BAR_PERIOD


class Rows:
    """The rows, from the topmost that can change to the lowest; none while no bar exists."""

    def __init__(self) -> None:
        self.all: list[BarRow] = []
        self._cursor = 0
        """Index of the row with the cursor."""
        self._count = 0

    @property
    def current(self) -> BarRow:
        """The row with the cursor."""
        return self.all[self._cursor]

    @property
    def top_has_ended(self) -> bool:
        """True if the cursor is below the topmost row."""
        return self._cursor > 0

    def has_bar(self) -> bool:
        """Return True if a row was rewritten: with several rows, the topmost one was."""
        return len(self.all) > 1 or self.all[0].was_rewritten

    def add(self) -> None:
        """Add an empty row below the others."""
        self._count += 1
        self.all.append(BarRow(self._count))

    def newline(self, newline: bytes, now: float) -> None:
        """End the row with the cursor, which goes to the next one."""
        self.current.finish(newline, now)
        self._cursor += 1
        if self._cursor == len(self.all):
            self.add()

    def up(self, count: int) -> None:
        """Move the cursor up to an earlier row, which the next text overwrites."""
        if self.current.text:
            self.current.fold()
        self._cursor = max(0, self._cursor - count)
        # The cursor is back at or above these rows, so none of them has ended.
        for row in self.all[self._cursor :]:
            row.ended_at = math.inf
        self.current.fold()

    def take_lines(self) -> list[BarRow]:
        """Take away the rows at the top that are ordinary lines, or too far above the cursor."""
        taken = []
        while self.top_has_ended and (len(self.all) > _MOST_ROWS or not self.all[0].was_rewritten):
            taken.append(self._take_top())
        return taken

    def take_settled(self, now: float) -> list[BarRow]:
        """Take away the rows at the top to which the cursor has not returned in time."""
        taken = []
        while self.top_has_ended and self.all[0].is_settled(now):
            taken.append(self._take_top())
        return taken

    def _take_top(self) -> BarRow:
        self._cursor -= 1
        return self.all.pop(0)

    def take_all(self) -> list[BarRow]:
        """Take away all rows: no bar is left."""
        taken, self.all, self._cursor = self.all, [], 0
        return taken

    def replace_all(self, row: BarRow) -> list[BarRow]:
        """Take away all rows, and put *row* in their place."""
        taken, self.all, self._cursor = self.all, [row], 0
        return taken
