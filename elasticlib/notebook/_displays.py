r"""
Displays of a notebook's cell: progress bars of several ranks, and the last lines of a long output. Pure.

Rules of this file:

* Bars that run at the same time share a display: plain text with a name, which is replaced as a whole.
* All front ends support this (JupyterLab, Notebook, VS Code, Colab) without widgets, and a saved file has
  the last text. In text they support ``\r`` only in the last line of the last output, and only some
  support "cursor up".
* A display stays at the place of its first bar, with the last state of each bar. A new bar begins another
  display if the bars of its rank in the last one have ended.
* If nothing can be replaced, bars are lines: some states, and the last one.
* The memory of last lines is bounded. A line is kept as a terminal would show it. `Tail` replaces its
  strings and lists and does not change them, so that another thread may read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field, frozen

from elasticlib.notebook._marks import Bar

LINE_PERIOD = 1.0
"""Seconds between two states of a bar that is shown as lines."""
_MOST_DISPLAYS = 100
"""
Maximum number of displays of a cell, since browsers slow down beyond that.

In the last display, ended bars of a rank become lines when that rank begins another bar.
"""
_MOST_ROWS = 100
"""Maximum number of rows of a display; the oldest ended bars become lines."""
_NOT_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|[\x00-\x08\x0b-\x1a]")
"""Control sequences and characters other than colours."""
_MOST_LINES = 20
"""Number of last lines of a long output."""
_LONGEST_LINE = 1000
"""Maximum number of characters that are kept of such a line, from its end."""

_Key: TypeAlias = tuple[str, int]


@frozen
class DisplayText:
    """The text of a display."""

    name: str
    text: str
    is_new: bool
    """True for the first text of a display; False if it replaces the present text."""


@define(eq=False)
class _BarGroup:
    name: str
    rows: dict[_Key, str] = field(factory=dict)
    running: set[_Key] = field(factory=set)
    shown: str = ""
    is_changed: bool = False

    def text(self) -> str:
        # By the length first, so that rank 10 comes after rank 9.
        rows = sorted(self.rows.items(), key=lambda each: (len(each[0][0]), *each[0]))
        return "\n".join(f"{label}{state}" for (label, _), state in rows if state)


@define
class _Line:
    due: float
    shown: str = ""


class Bars:
    """
    The bars of one cell.

    *name* is the prefix of the names of its displays. *can_change*: its displays can be replaced.
    """

    def __init__(self, name: str, *, can_change: bool) -> None:
        self.can_change = can_change
        self._name = name
        self._last: _BarGroup | None = None
        """Latest display."""
        self._count = 0
        self._running: dict[_Key, _BarGroup] = {}
        self._changed: list[_BarGroup] = []
        self._lines: dict[_Key, _Line] = {}

    def take(self, bar: Bar, now: float) -> Iterator[str | DisplayText]:
        """Yield the parts to show at once; `changes` yields the rest. *now* is in seconds."""
        key, state = (bar.label, bar.number), _NOT_COLOURS.sub("", bar.state).rstrip()
        if not self.can_change:
            yield from self._as_line(key, state, bar.is_last, now)
        elif key in self._running:
            self._take_next_state(key, state, is_last=bar.is_last)
        # The bar began in another cell.
        elif bar.is_last:
            yield from _line(key, state)
        elif state:
            yield from self._begun(key, state)

    def _take_next_state(self, key: _Key, state: str, *, is_last: bool) -> None:
        group = self._running[key]
        if is_last:
            del self._running[key]
            group.running.discard(key)

        # A bar that clears itself at its end leaves no row.
        if is_last and not state:
            del group.rows[key]
        else:
            group.rows[key] = state

        self._change(group)

    def changes(self) -> Iterator[DisplayText]:
        """Yield the displays whose bars have changed since the last call."""
        changed, self._changed = self._changed, []
        for group in changed:
            group.is_changed = False
            text = group.text()
            if text != group.shown:
                group.shown = text
                yield DisplayText(group.name, text, is_new=False)

    def _change(self, group: _BarGroup) -> None:
        if not group.is_changed:
            group.is_changed = True
            self._changed.append(group)

    def _begun(self, key: _Key, state: str) -> Iterator[str | DisplayText]:
        """Place a new bar in a new display or in an existing one, and yield the parts to show at once."""
        group = self._place(key[0])
        if group is None:
            self._count += 1
            group = self._last = _BarGroup(f"{self._name}-{self._count}")
            self._add(key, state, group)
            group.shown = group.text()
            yield DisplayText(group.name, group.shown, is_new=True)
            return

        self._add(key, state, group)
        yield from self._rows_left(group, key[0])
        self._change(group)

    def _add(self, key: _Key, state: str, group: _BarGroup) -> None:
        group.rows[key] = state
        group.running.add(key)
        self._running[key] = group

    def _rows_left(self, group: _BarGroup, label: str) -> Iterator[str]:
        """Remove ended bars from *group*, which got a bar of the rank *label*, and yield them as lines."""
        ended = [each for each in group.rows if each not in group.running]
        for key in ended:
            is_full = len(group.rows) > _MOST_ROWS
            # In the last display a new bar replaces the earlier bars of its rank.
            is_replaced = self._count >= _MOST_DISPLAYS and key[0] == label
            if is_full or is_replaced:
                yield from _line(key, group.rows.pop(key))

    def _place(self, label: str) -> _BarGroup | None:
        """Return the display for another bar of the rank *label*; None for a new display."""
        # A nested bar belongs to the bar that its rank has running.
        of_rank = [group for (running, _), group in self._running.items() if running == label]
        if of_rank:
            return of_rank[0]
        last = self._last
        if last is None or self._count >= _MOST_DISPLAYS:
            return last
        # Bars of other ranks that run at the same time share a display.
        has_room = label not in {key[0] for key in last.rows}
        return last if last.running and has_room else None

    def _as_line(self, key: _Key, state: str, is_last: bool, now: float) -> Iterator[str]:
        # The first state waits too: of a short bar only the last state becomes a line.
        line = self._lines.setdefault(key, _Line(now + LINE_PERIOD))
        if state != line.shown and (is_last or now >= line.due):
            line.due, line.shown = now + LINE_PERIOD, state
            yield from _line(key, state)
        if is_last:
            del self._lines[key]


def _line(key: _Key, state: str) -> Iterator[str]:
    if state:
        yield f"{key[0]}{state}\n"


class Tail:
    """The last lines of the text that `feed` gets."""

    def __init__(self) -> None:
        self.is_changed = False
        """True if more text arrived since the last call of `text`."""
        self._lines: list[str] = []
        self._count = 0
        self._open = ""
        """The line without an end."""

    def feed(self, text: str) -> None:
        """Add *text*."""
        if not text:
            return
        # Only the last lines of a large text are processed.
        *ended, present = (self._open + text).rsplit("\n", _MOST_LINES + 1)
        self._count += text.count("\n")
        self._lines = [*self._lines, *map(_shown, ended)][-_MOST_LINES:]
        self._open = _shown(present)
        self.is_changed = True

    def text(self, place: str) -> str:
        """Return a line with the number of omitted lines and the *place* of the full output, then the last lines."""
        self.is_changed = False
        lines = [*self._lines, self._open] if self._open else self._lines
        count = self._count + bool(self._open)
        left_out = count - min(len(lines), _MOST_LINES)
        heading = f"[... lines left out here: {left_out:,}; " if left_out else "["
        heading += f"the full output is in {place}]"
        return "\n".join([heading, *(_NOT_COLOURS.sub("", line) for line in lines[-_MOST_LINES:])])


def _shown(line: str) -> str:
    """Return the part of *line* that a terminal shows: after its last ``\\r``, but with a ``\\r`` at the end."""
    body = line.rstrip("\r")
    return (body.rpartition("\r")[2] + line[len(body) :])[-_LONGEST_LINE:]
