r"""
Assembly of whole lines and progress bars from a worker's bytes, for a console that can replace text.

Rules of this file: pure; bytes in, bytes out, time is an argument. The division of the input into chunks
does not change any line. A line that ``\r`` rewrites is a bar once it was shown. Its states are output
ten times a second, at the same moments for all streams, so that a console shows them together.

Nested bars return to an ended bar by "cursor up". So an ended bar, and all output after it, waits a
tenth of a second for that (`_bar_rows`). Everything else is as in `LineAssembler`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from elasticlib._times import soonest
from elasticlib.logs._bar_rows import BAR_PERIOD, BarRow, Rows
from elasticlib.logs._lines import LONGEST_LINE, LineAssembler

BarText: TypeAlias = Callable[[bytes, int, bytes, bool], bytes]
"""
Return the bytes that represent a bar's state in a block of lines.

The arguments are the prefix of its line, its number in the stream, its state without newline (empty: the
bar is invisible now), and True for its last state.
"""
_CONTROL = re.compile(rb"\r?\n|\r|\x1b\[(\d*)A")
"""A newline, a return to the first column, or "cursor up"."""
_UNFINISHED = re.compile(rb"(?:\r|\x1b(?:\[\d*)?)\Z")
"""The first part of such a sequence, at the end of a chunk."""
_LONE_RETURN = re.compile(rb"\r(?!\n)")


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
        self._rows = Rows()
        """Hold the open lines while a bar exists."""
        self._incomplete = b""
        """Bytes that may be the first part of a control sequence."""
        self._bars_due: float | None = None
        """Time of the next output of states; None if all were output."""

    @property
    def is_open(self) -> bool:
        """True if a line has no end yet, or can still change."""
        return bool(self._rows.all) or self._plain.is_open

    def feed(self, data: bytes, now: float) -> bytes:
        """Process *data*, and return the lines that it completed. *now* is in seconds."""
        out = [self._ends(self._rows.take_settled(now))]
        if not self._rows.all:
            found = _LONE_RETURN.search(data)
            if found is None:
                return b"".join([*out, self._plain.feed(data, now)])

            # The lines above the first bar pass at once; only the line of the bar becomes a row.
            begin = data.rfind(b"\n", 0, found.start()) + 1
            out.append(self._plain.feed(data[:begin], now))
            self._rows.add()
            data = self._plain.take() + data[begin:]

        out.append(self._interpret(self._incomplete + data, now))
        if self._has_no_bar():
            out.append(self._return_to_plain(now))
        elif self._bars_due is None:
            self._bars_due = _next_moment(now)
        self._set_due()
        return b"".join(out)

    def tick(self, now: float) -> bytes:
        """Return the new states of bars that are due at *now*, and lines that waited for a bar."""
        if self.due is None or now < self.due:
            return b""
        out = [self._ends(self._rows.take_settled(now))]
        if self._bars_due is not None and now >= self._bars_due:
            self._bars_due = None
            out.append(self._new_states(now))

        if self._has_no_bar():
            out.append(self._return_to_plain(now))
        self._set_due()
        return b"".join(out)

    def finish(self) -> bytes:
        """Return the open lines, each with a newline, and the ends of all bars."""
        if not self._rows.all:
            return self._plain.finish()

        # An escape sequence that was never completed is text.
        current = self._rows.current
        current.text += self._incomplete.removesuffix(b"\r")
        is_rewritten = self._incomplete == b"\r"
        current.is_wiped = not is_rewritten and current.under is not None and current.under.isspace()

        out = []
        for row in self._rows.all:
            if self._is_visible_at_end(row):
                out.append(self._end(row))
            elif row.shown is not None:
                out.append(self._bar(self._prefix, row.number, b"", True))

        self._rows.take_all()
        self._incomplete = b""
        self._bars_due = self.due = None
        return b"".join(out)

    # Input.

    def _interpret(self, data: bytes, now: float) -> bytes:
        """Write *data* into the rows, as a terminal does, and return the lines that this completes."""
        unfinished = _UNFINISHED.search(data)
        self._incomplete = b"" if unfinished is None else unfinished[0]
        until = len(data) - len(self._incomplete)

        out = []
        at = 0
        for control in _CONTROL.finditer(data, 0, until):
            out.append(self._write(data[at : control.start()]))
            out.append(self._follow_control(control, now))
            at = control.end()
        out.append(self._write(data[at:until]))
        return b"".join(out)

    def _follow_control(self, control: re.Match[bytes], now: float) -> bytes:
        if control[0] == b"\r":
            self._rows.current.fold()
            return b""
        if control[0].endswith(b"\n"):
            self._rows.newline(control[0], now)
            return self._ends(self._rows.take_lines())
        if self._rows.has_bar():
            self._rows.up(int(control[1] or 1))
            return b""
        # Without a bar, a movement of the cursor is text like any other.
        return self._write(control[0])

    def _write(self, text: bytes) -> bytes:
        row = self._rows.current
        row.text += text

        # Too long for a bar: all rows are output, this one in pieces.
        out = []
        while len(row.text) > self._longest:
            rest = row.text[self._longest :]
            del row.text[self._longest :]
            row = BarRow(row.number, rest, b"" if row.was_rewritten else None)
            out.append(self._ends(self._rows.replace_all(row)))
        return b"".join(out)

    # Output.

    def _ends(self, rows: Iterable[BarRow]) -> bytes:
        return b"".join(map(self._end, rows))

    def _end(self, row: BarRow) -> bytes:
        """Return the output at the end of *row*."""
        state = row.state()
        if row.shown is None:
            return self._prefix + state + row.end
        if row.is_wiped:
            # The bar has cleared itself; the later text of its row is an ordinary line.
            over = self._bar(self._prefix, row.number, b"", True)
            return over + self._prefix + state.rstrip(b" ") + row.end
        return self._bar(self._prefix, row.number, state, True)

    def _is_visible_at_end(self, row: BarRow) -> bool:
        """Return True if *row* is visible at the end of the stream."""
        if row.ended_at < math.inf:
            return True
        state = row.state()
        return bool(state.strip() if self._is_bar(row) else state)

    def _new_states(self, now: float) -> bytes:
        """Return the states of bars that were not shown yet."""
        out = []
        for row in self._rows.all:
            may_be_a_line = row.shown is None and self._rows.top_has_ended
            if may_be_a_line:
                # An ended row may be an ordinary line. A later bar must not be shown above it.
                self._bars_due = _next_moment(now)
                continue

            state = self._visible_state(row)
            if state != (row.shown or b""):
                row.shown = state
                out.append(self._bar(self._prefix, row.number, state, False))
        return b"".join(out)

    def _visible_state(self, row: BarRow) -> bytes:
        """Return the state of a bar; empty for other lines, and for a bar that cleared itself."""
        if not self._is_bar(row):
            return b""
        state = row.state()
        return state if state.strip() else b""

    def _is_bar(self, row: BarRow) -> bool:
        """Return True for a row that was rewritten, or that the kept ``\\r`` will rewrite."""
        return row.was_rewritten or (self._incomplete == b"\r" and row is self._rows.current)

    # The way back to plain lines, and the time of the next output.

    def _has_no_bar(self) -> bool:
        """Return True if the only row left is an ordinary line."""
        if not self._rows.all or self._rows.has_bar():
            return False
        # The kept "\r" may begin a bar.
        return self._incomplete != b"\r"

    def _return_to_plain(self, now: float) -> bytes:
        (row,) = self._rows.take_all()
        text, self._incomplete = bytes(row.text) + self._incomplete, b""
        return self._plain.feed(text, now)

    def _set_due(self) -> None:
        self.due = None
        if not self._rows.all:
            return

        # The topmost row has ended, and waits for "cursor up".
        settles_at = self._rows.all[0].ended_at + BAR_PERIOD if self._rows.top_has_ended else None
        self.due = soonest(self._bars_due, settles_at)


def _next_moment(now: float) -> float:
    """Return the next time, in seconds, at which the bars of all streams are output."""
    return (math.floor(now / BAR_PERIOD) + 1) * BAR_PERIOD
