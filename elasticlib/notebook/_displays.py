r"""
Displays of a notebook's cell: the progress bars of several ranks, side by side, and the last lines of a long output.
Pure.

Rules of this file: bars that run at the same time share a display, a piece of plain text with an identity that is
replaced as a whole. All front ends do that (JupyterLab, Notebook, VS Code, Colab; a saved file has the last text), and
it needs no widgets. Of text, they know ``\r`` within the last line of the last output alone, and "cursor up" only some.
A display stays where its first bar began, with the last state of each; a bar that begins when those of its rank in it
have ended begins another one. Where nothing can be replaced bars are lines: a state now and then, and the last.
Of last lines, memory is bounded, whatever is fed; a line is what a terminal would show of it. `Tail` replaces its text,
and never changes it, so that another thread may ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field, frozen

from elasticlib.notebook._marks import Bar

LINE_PERIOD = 1.0
"""Seconds between two states of a bar where they are lines."""
_MOST_DISPLAYS = 100
"""Of a cell. Browsers do not bear many; with the last one bars that have ended become lines when its rank goes on."""
_MOST_ROWS = 100
"""Of a display that grows, as with nested bars that stay; the oldest that have ended become lines."""
_NOT_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|[\x00-\x08\x0b-\x1a]")
"""What moves a terminal's cursor, or does anything else but colour text."""
_MOST_LINES = 20
"""Of the last lines of a long output."""
_LONGEST_LINE = 1000
"""Characters of such a line that are kept, from its end."""

_Key: TypeAlias = tuple[str, int]


@frozen
class DisplayText:
    """The text of a display."""

    name: str
    text: str
    is_new: bool
    """Whether the display begins with it; else it takes the place of what is there."""


@define(eq=False)
class _BarGroup:
    name: str
    rows: dict[_Key, str] = field(factory=dict)
    running: set[_Key] = field(factory=set)
    shown: str = ""
    is_changed: bool = False

    def text(self) -> str:
        rows = sorted(self.rows.items(), key=lambda each: (len(each[0][0]), *each[0]))
        return "\n".join(f"{label}{state}" for (label, _), state in rows if state)


@define
class _Line:
    due: float
    shown: str = ""


class Bars:
    """The bars of one cell. *name* begins the names of its displays; *can_change*: it has such that can be replaced."""

    def __init__(self, name: str, *, can_change: bool) -> None:
        self.can_change = can_change
        self._name = name
        self._last: _BarGroup | None = None
        """The display that began last."""
        self._count = 0
        self._running: dict[_Key, _BarGroup] = {}
        self._changed: list[_BarGroup] = []
        self._lines: dict[_Key, _Line] = {}

    def take(self, bar: Bar, now: float) -> Iterator[str | DisplayText]:
        """Yield the part to be shown at once; `changes` has the rest."""
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
        """Give a new bar its place, in a display of its own or in one that there is."""
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
        """Take rows of bars that have ended out of *group*, which got a bar of the rank *label*, as lines."""
        ended = [each for each in group.rows if each not in group.running]
        for key in ended:
            is_full = len(group.rows) > _MOST_ROWS
            # In the last display a new bar takes the place of those that its rank had before.
            is_replaced = self._count >= _MOST_DISPLAYS and key[0] == label
            if is_full or is_replaced:
                yield from _line(key, group.rows.pop(key))

    def _place(self, label: str) -> _BarGroup | None:
        """Return the display for another bar of the rank that *label* stands for; None for a new one."""
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
    """The last lines of what is fed."""

    def __init__(self) -> None:
        self.is_changed = False
        """Whether more came since `text` was asked for last."""
        self._lines: list[str] = []
        self._count = 0
        self._open = ""
        """The line that has not ended."""

    def feed(self, text: str) -> None:
        """Take what comes next."""
        if not text:
            return
        # Only the last lines of a large text are looked at.
        *ended, present = (self._open + text).rsplit("\n", _MOST_LINES + 1)
        self._count += text.count("\n")
        self._lines = [*self._lines, *map(_shown, ended)][-_MOST_LINES:]
        self._open = _shown(present)
        self.is_changed = True

    def text(self, place: str) -> str:
        """A line that says what was left out, and that all is at *place*; then the last lines."""
        self.is_changed = False
        lines = [*self._lines, self._open] if self._open else self._lines
        count = self._count + bool(self._open)
        left_out = count - min(len(lines), _MOST_LINES)
        heading = f"[... lines left out here: {left_out:,}; " if left_out else "["
        heading += f"all of the output is in {place}]"
        return "\n".join([heading, *(_NOT_COLOURS.sub("", line) for line in lines[-_MOST_LINES:])])


def _shown(line: str) -> str:
    """What a terminal shows of *line*: what follows the last carriage return; one at its end waits for more."""
    body = line.rstrip("\r")
    return (body.rpartition("\r")[2] + line[len(body) :])[-_LONGEST_LINE:]
