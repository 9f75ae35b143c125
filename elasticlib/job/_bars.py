r"""
What a notebook's cell shows of the progress bars of several ranks: one line for each, side by side. Pure.

Rules of this file: bars that run at the same time share a display, a piece of plain text with an identity that is
replaced as a whole. All front ends do that (JupyterLab, Notebook, VS Code, Colab; a saved file has the last text), and
it needs no widgets. Of text, they know ``\r`` within the last line of the last output alone, and "cursor up" only some.
A display stays where its first bar began, with the last state of each; a bar that begins when those of its rank in it
have ended begins another one. Where nothing can be replaced bars are lines: a state now and then, and the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field, frozen

from elasticlib._marks import Bar

LINE_PERIOD = 1.0
"""Seconds between two states of a bar where they are lines."""
_MOST_DISPLAYS = 100
"""Of a cell. Browsers do not bear many; with the last one bars that have ended become lines when its rank goes on."""
_MOST_ROWS = 100
"""Of a display that grows, as with nested bars that stay; the oldest that have ended become lines."""
NOT_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|[\x00-\x08\x0b-\x1a]")
"""What moves a terminal's cursor, or does anything else but colour text."""

_Key: TypeAlias = tuple[str, int]


@frozen
class Picture:
    """The text of a display."""

    name: str
    text: str
    is_new: bool
    """Whether the display begins with it; else it takes the place of what is there."""


@define(eq=False)
class _Group:
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
        self._last: _Group | None = None
        """The display that began last."""
        self._count = 0
        self._running: dict[_Key, _Group] = {}
        self._changed: list[_Group] = []
        self._lines: dict[_Key, _Line] = {}

    def take(self, bar: Bar, now: float) -> Iterator[str | Picture]:
        """Yield the part to be shown at once; `changes` has the rest."""
        key, state = (bar.label, bar.number), NOT_COLOURS.sub("", bar.state).rstrip()
        if not self.can_change:
            yield from self._as_line(key, state, bar.is_last, now)
        elif key in self._running:
            self._take_next_state(key, state, is_last=bar.is_last)
        elif bar.is_last:  # it began in another cell
            yield from _line(key, state)
        elif state:
            yield from self._begun(key, state)

    def _take_next_state(self, key: _Key, state: str, *, is_last: bool) -> None:
        group = self._running[key]
        if is_last:
            del self._running[key]
            group.running.discard(key)
        if is_last and not state:  # one that clears itself at its end
            del group.rows[key]
        else:
            group.rows[key] = state
        self._change(group)

    def changes(self) -> Iterator[Picture]:
        """Yield the displays whose bars have changed since the last call."""
        changed, self._changed = self._changed, []
        for group in changed:
            group.is_changed = False
            text = group.text()
            if text != group.shown:
                group.shown = text
                yield Picture(group.name, text, is_new=False)

    def _change(self, group: _Group) -> None:
        if not group.is_changed:
            group.is_changed = True
            self._changed.append(group)

    def _begun(self, key: _Key, state: str) -> Iterator[str | Picture]:
        """Give a new bar its place, in a display of its own or in one that there is."""
        group = self._place(key[0])
        if group is None:
            self._count += 1
            group = self._last = _Group(f"{self._name}-{self._count}")
            self._add(key, state, group)
            group.shown = group.text()
            yield Picture(group.name, group.shown, is_new=True)
            return
        self._add(key, state, group)
        yield from self._rows_left(group, key[0])
        self._change(group)

    def _add(self, key: _Key, state: str, group: _Group) -> None:
        group.rows[key] = state
        group.running.add(key)
        self._running[key] = group

    def _rows_left(self, group: _Group, label: str) -> Iterator[str]:
        """Take rows of bars that have ended out of *group*, which got a bar of the rank *label*, as lines."""
        ended = [each for each in group.rows if each not in group.running]
        for key in ended:
            is_full = len(group.rows) > _MOST_ROWS
            # In the last display a new bar takes the place of those that its rank had before.
            is_replaced = self._count >= _MOST_DISPLAYS and key[0] == label
            if is_full or is_replaced:
                yield from _line(key, group.rows.pop(key))

    def _place(self, label: str) -> _Group | None:
        """Return the display for another bar of the rank that *label* stands for; None for a new one."""
        for (running, _), group in self._running.items():
            if running == label:  # a nested bar
                return group
        last = self._last
        if last is None or self._count >= _MOST_DISPLAYS:
            return last
        labels = {key[0] for key in last.rows}
        # Beside the bars of other ranks that run at the same time.
        return last if last.running and label not in labels else None

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
