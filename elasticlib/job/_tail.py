"""
The last lines of an output that is longer than a notebook's cell shows. Pure.

Rules of this file: memory is bounded, whatever comes; a line is what a terminal would show of it. What `Tail` holds is
replaced, never changed, so that another thread may ask for its text.
"""

from __future__ import annotations

from elasticlib.job._bars import NOT_COLOURS

_MOST_LINES = 20
_LONGEST_LINE = 1000
"""Characters of a line that are kept, from its end."""


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
        return "\n".join([heading, *(NOT_COLOURS.sub("", line) for line in lines[-_MOST_LINES:])])


def _shown(line: str) -> str:
    """What a terminal shows of *line*: what follows the last carriage return; one at its end waits for more."""
    body = line.rstrip("\r")
    return (body.rpartition("\r")[2] + line[len(body) :])[-_LONGEST_LINE:]
