r"""
Assembly of whole lines and progress bars from a worker's bytes, for a console that can replace text.

Rules of this file: pure; bytes in, bytes out, time is an argument. The division of the input into chunks
does not change any line. A line that ``\r`` rewrites is a bar once it was shown. Its states are output
ten times a second, at the same moments for all streams, so that a console shows them together.

Nested bars return to an ended bar by "cursor up". So an ended bar, and all output after it, waits a
tenth of a second for that. Everything else is as in `LineAssembler`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from attrs import define, field

from elasticlib.logs._lines import LONGEST_LINE, LineAssembler, overtype

BarText: TypeAlias = Callable[[bytes, int, bytes, bool], bytes]
"""
Return the bytes that represent a bar's state in a block of lines.

The arguments are the prefix of its line, its number in the stream, its state without newline (empty: the
bar is invisible now), and True for its last state.
"""
BAR_PERIOD = 0.1
"""Seconds between two states of a bar, and seconds in which "cursor up" can return to an ended one."""
_MOST_ROWS = 8
"""Maximum number of rows to which "cursor up" can return; more nested bars are rare."""
_CONTROL = re.compile(rb"\r?\n|\r|\x1b\[(\d*)A")
_UNFINISHED = re.compile(rb"(?:\r|\x1b(?:\[\d*)?)\Z")
_LONE_RETURN = re.compile(rb"\r(?!\n)")


@define
class _Row:
    number: int
    open: bytearray = field(factory=bytearray)
    """Bytes since the last ``\\r``."""
    under: bytes | None = None
    """Text below `open`, which `open` overwrites; None before the first ``\\r``."""
    end: bytes = b"\n"
    left_at: float = math.inf
    """Time of its newline, in seconds."""
    is_wiped: bool = False
    """True if a bar in this row had cleared itself before the present text."""
    shown: bytes | None = None
    """State that was output last; None if none was, so that it is still an ordinary line."""

    def state(self) -> bytes:
        """Return the text of the row as a terminal shows it."""
        return bytes(self.open) if self.under is None else overtype(self.under, bytes(self.open))

    def fold(self) -> None:
        """Return to the first column: the next text overwrites the row."""
        self.under = self.under or b""
        self.under = self.state()
        self.open.clear()


class BarAssembler:
    """The open lines of one stream; `feed` takes bytes from the stream and returns output to write."""

    def __init__(self, prefix: bytes, bar: BarText, longest_line: int = LONGEST_LINE) -> None:
        self.due: float | None = None
        """Time at which `tick` has output, in seconds; None while nothing waits."""
        self._prefix = prefix
        self._bar = bar
        self._longest = longest_line
        self._plain = LineAssembler(prefix, longest_line)
        """Holds the open line while no bar exists."""
        self._rows: list[_Row] = []
        """Rows from the topmost that can change to the lowest; empty while no bar exists."""
        self._at = 0
        """Index of the row with the cursor."""
        self._numbers = 0
        self._incomplete = b""
        """Bytes that may be the first part of a control sequence."""
        self._bars_due: float | None = None

    @property
    def is_open(self) -> bool:
        """True if a line has no end yet, or can still change."""
        return bool(self._rows) or self._plain.is_open

    def feed(self, data: bytes, now: float) -> bytes:
        """Process *data*, and return the lines that it completed. *now* is in seconds."""
        out = [*self._settled(now)]
        if not self._rows:
            found = _LONE_RETURN.search(data)
            if found is None:
                return b"".join([*out, self._plain.feed(data, now)])
            # The lines above the first bar pass at once; only the line of the bar becomes a row.
            begin = data.rfind(b"\n", 0, found.start()) + 1
            out.append(self._plain.feed(data[:begin], now))
            self._new_row()
            data = self._plain.take() + data[begin:]

        out += self._taken(self._incomplete + data, now)
        return b"".join([*out, self._rest(now)])

    def tick(self, now: float) -> bytes:
        """Return the new states of bars that are due at *now*, and lines that waited for a bar."""
        if self.due is None or now < self.due:
            return b""
        out = [*self._settled(now)]
        if self._bars_due is not None and now >= self._bars_due:
            self._bars_due = None
            out += self._states(now)
        return b"".join([*out, self._rest(now, fed=False)])

    def _states(self, now: float) -> Iterator[bytes]:
        """Yield the states of bars that were not shown yet."""
        for row in self._rows:
            if self._may_be_a_line(row):
                # An ended row may be an ordinary line. A later bar must not be shown above it.
                self._bars_due = _next_moment(now)
                continue
            state = self._visible_state(row)
            if state != (row.shown or b""):
                row.shown = state
                yield self._bar(self._prefix, row.number, state, False)

    def _may_be_a_line(self, row: _Row) -> bool:
        return row.shown is None and self._at > 0

    def _visible_state(self, row: _Row) -> bytes:
        """Return the state of a bar; empty for other lines, and for a bar that cleared itself."""
        if not self._is_bar(row):
            return b""
        state = row.state()
        return state if state.strip() else b""

    def _is_bar(self, row: _Row) -> bool:
        """Return True for a row that was rewritten, or that the held-back ``\\r`` will rewrite."""
        if row.under is not None:
            return True
        return self._incomplete == b"\r" and row is self._rows[self._at]

    def finish(self) -> bytes:
        """Return the open lines, each with a newline, and the ends of all bars."""
        if not self._rows:
            return self._plain.finish()

        current = self._rows[self._at]

        # An escape sequence that was never completed is text.
        current.open += self._incomplete.removesuffix(b"\r")
        is_rewritten = self._incomplete == b"\r"
        current.is_wiped = not is_rewritten and current.under is not None and current.under.isspace()
        out = []
        for row in self._rows:
            if self._has_end(row):
                out.append(self._last(row))
            elif row.shown is not None:
                out.append(self._bar(self._prefix, row.number, b"", True))

        self._rows.clear()
        self._incomplete, self._at = b"", 0
        self._bars_due = self.due = None
        return b"".join(out)

    def _has_end(self, row: _Row) -> bool:
        """Return True if *row* is visible at the end of the stream."""
        if row.left_at < math.inf:
            return True
        state = row.state()
        return bool(state.strip() if self._is_bar(row) else state)

    def _new_row(self) -> None:
        self._numbers += 1
        self._rows.append(_Row(self._numbers))

    def _taken(self, data: bytes, now: float) -> Iterator[bytes]:
        """Write *data* into the rows, and yield the lines that this completes."""
        unfinished = _UNFINISHED.search(data)
        self._incomplete = b"" if unfinished is None else unfinished[0]
        until = len(data) - len(self._incomplete)
        at = 0
        for found in _CONTROL.finditer(data, 0, until):
            yield from self._written(data[at : found.start()])
            at = found.end()
            if found[0] == b"\r":
                self._rows[self._at].fold()
            elif found[0].endswith(b"\n"):
                yield from self._ended(found[0], now)
            # Without a bar, a movement of the cursor is text like any other.
            elif self._has_bar():
                self._up(int(found[1] or 1))
            else:
                yield from self._written(found[0])

        yield from self._written(data[at:until])

    def _written(self, text: bytes) -> Iterator[bytes]:
        row = self._rows[self._at]
        row.open += text

        # Too long for a bar: all rows are output, this one in pieces.
        while len(row.open) > self._longest:
            rest = row.open[self._longest :]
            del row.open[self._longest :]
            number, was_rewritten = row.number, row.under is not None
            for each in self._rows:
                yield self._last(each)
            row = _Row(number, rest, b"" if was_rewritten else None)
            self._rows, self._at = [row], 0

    def _ended(self, newline: bytes, now: float) -> Iterator[bytes]:
        row = self._rows[self._at]
        row.end, row.left_at = newline, now
        row.is_wiped = False
        if row.under is not None:
            row.is_wiped = row.under.isspace()
            row.fold()

        self._at += 1
        if self._at == len(self._rows):
            self._new_row()
        while self._at > 0 and self._must_release_top():
            yield self._without_top()

    def _must_release_top(self) -> bool:
        """Return True if the topmost row is an ordinary line, or too far above the cursor."""
        return len(self._rows) > _MOST_ROWS or self._rows[0].under is None

    def _up(self, rows: int) -> None:
        current = self._rows[self._at]
        if current.open:
            current.fold()
        self._at = max(0, self._at - rows)
        # The cursor is back at or above these rows, so none of them has ended.
        for row in self._rows[self._at :]:
            row.left_at = math.inf
        self._rows[self._at].fold()

    def _settled(self, now: float) -> Iterator[bytes]:
        """Yield the rows to which the cursor has not returned in time."""
        while self._at > 0 and self._is_top_settled(now):
            yield self._without_top()

    def _is_top_settled(self, now: float) -> bool:
        top = self._rows[0]
        return top.under is None or now >= top.left_at + BAR_PERIOD

    def _without_top(self) -> bytes:
        self._at -= 1
        return self._last(self._rows.pop(0))

    def _last(self, row: _Row) -> bytes:
        """Return the output at the end of *row*."""
        state = row.state()
        if row.shown is None:
            return self._prefix + state + row.end
        if row.is_wiped:
            # The bar has cleared itself; the later text of its row is an ordinary line.
            over = self._bar(self._prefix, row.number, b"", True)
            return over + self._prefix + state.rstrip(b" ") + row.end
        return self._bar(self._prefix, row.number, state, True)

    def _rest(self, now: float, *, fed: bool = True) -> bytes:
        """Return to plain lines if no bar is left, else set the time of the next `tick`."""
        self.due = None
        if not self._rows:
            return b""

        if not self._has_bar() and self._incomplete != b"\r":
            text = bytes(self._rows.pop().open) + self._incomplete
            self._incomplete = b""
            return self._plain.feed(text, now)

        if fed and self._bars_due is None:
            self._bars_due = _next_moment(now)
        self.due = self._bars_due

        # The topmost row has ended, and waits for "cursor up".
        if self._at > 0:
            self._make_due_by(self._rows[0].left_at + BAR_PERIOD)
        return b""

    def _make_due_by(self, at: float) -> None:
        if self.due is None or at < self.due:
            self.due = at

    def _has_bar(self) -> bool:
        return len(self._rows) > 1 or self._rows[0].under is not None


def _next_moment(now: float) -> float:
    """Return the next time, in seconds, at which the bars of all streams are output."""
    return (math.floor(now / BAR_PERIOD) + 1) * BAR_PERIOD
