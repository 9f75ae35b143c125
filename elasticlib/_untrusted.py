"""
Readers of untrusted data: from a peer, a stranger or a worker. Pure.

Rules of this file: for any input a reader returns plain data within bounds, or raises a
``ValueError`` that says what is wrong. Returned text can be printed, logged and written in UTF-8,
and cannot control a terminal. Reading data a second time changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from json import loads
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self

TOKEN_VARIABLE = "ELASTICLIB_TOKEN"
"""Environment variable with the token of a job, which lets its nodes recognize each other."""
LARGEST = 2**63 - 1
"""Largest absolute value of a whole number: more than any count, and it fits into 64 bits."""
LONGEST_TIME = 4e9
"""Seconds, more than a century, which every function that waits accepts."""
LONGEST_NAME = 300
_DEEPEST = 50

# Control characters of terminals, line breaks other than "\n", marks that reverse the order of
# letters, invisible characters, and lone surrogates, which no encoding takes.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINES = re.compile(f"[{_HIDDEN}]")
_IN_LINE = re.compile(f"[\t\n{_HIDDEN}]")


def parse(data: bytes | str, *, constants: bool = False) -> Any:
    """
    Return the JSON value of *data*. Raises ValueError.

    *constants*: also accept NaN and Infinity, as Python writes them.
    """
    try:
        return loads(data, parse_constant=float if constants else _no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def parse_shallow(text: str) -> Any:
    """
    Return the JSON value of *text*, with NaN and Infinity allowed. Raises ValueError.

    The value is nested at most `_DEEPEST` levels deep, so that recursive code can walk through it.
    """
    value = parse(text, constants=True)
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _within(each)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _within(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def exactly(value: Any, kind: type) -> Any:
    """Return *value* if its type is exactly *kind*: a bool does not pass as an int. Raises ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{shown(value)} should be a {kind.__name__}")
    return value


def whole(value: Any, least: int = -LARGEST, most: int = LARGEST) -> int:
    """Return *value* if it is an int within these bounds. Raises ValueError."""
    number: int = exactly(value, int)
    if not least <= number <= most:
        raise ValueError(f"{shown(value)} should be a whole number from {least} to {most}")
    return number


def seconds(value: Any, least: float = -LONGEST_TIME, most: float = LONGEST_TIME) -> float:
    """Return *value* as a float if it is a finite number of seconds within bounds. Raises ValueError."""
    if type(value) not in (int, float):
        raise ValueError(f"{shown(value)} should be a number")
    # NaN and infinities fail this comparison as well.
    if not least <= value <= most:
        raise ValueError(f"{shown(value)} should be a finite number of seconds from {least:g} to {most:g}")
    return float(value)


def line(value: Any) -> str:
    """Return a text as one printable line: line ends, tabs and hidden characters are escaped."""
    return _escaped(exactly(value, str), _IN_LINE)


def lines(value: Any) -> str:
    """Return a text of any number of printable lines: hidden characters but ``\\n`` and tabs are escaped."""
    return _escaped(exactly(value, str), _IN_LINES)


def name(value: Any, most: int = LONGEST_NAME) -> str:
    """Return *value* if it is a name: 1 to *most* characters, none hidden. Raises ValueError."""
    text: str = exactly(value, str)
    if not 0 < len(text) <= most or _IN_LINE.search(text):
        raise ValueError(f"{shown(value)} is not a name: a name has 1 to {most} printable characters")
    return text


def as_name(text: str) -> str:
    """Return this program's own *text* as a name that `name` accepts: escaped and shortened."""
    return line(text)[: LONGEST_NAME // 2] or "?"


def shown(value: Any) -> str:
    """Return the first 40 characters of the repr of a value; its type where repr fails."""
    try:
        return f"{value!r:.40}"
    except (ValueError, RecursionError):
        # ValueError: a number with too many digits. RecursionError: lists nested too deeply.
        return f"a {type(value).__name__}"


def _escaped(text: str, what: re.Pattern[str]) -> str:
    # Most texts are printable, and this test is quick.
    if text.isprintable():
        return text
    return what.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@dataclass(frozen=True)
class _Span:
    since: float
    logged: int
    omitted: int = 0


@dataclass(frozen=True)
class Refusals:
    """
    Rate limit of log lines about refused data, by kind, so that a busy sender cannot fill the log.

    The first `most` of each kind in a `span` are logged. The first of a later span also gives the
    number that were left out.
    """

    most: int = 5
    """Log lines of one kind in one span."""
    span: float = 60.0
    """Seconds of one span."""
    _spans: Mapping[str, _Span] = field(default_factory=dict)

    def refuse(self, kind: str, why: str, now: float) -> tuple[Self, str | None]:
        """
        Count one refusal of this *kind*. Return the new state and the text to log, or None.

        Use few kinds, since each is remembered. *now* is in seconds.
        """
        last = self._spans.get(kind, _Span(now, 0))
        is_over = now >= last.since + self.span
        if last.logged >= self.most and not is_over:
            return self._with(kind, replace(last, omitted=last.omitted + 1)), None
        if not is_over:
            return self._with(kind, replace(last, logged=last.logged + 1)), why

        if last.omitted:
            why += f" ({last.omitted} more messages of this kind were rejected before)"
        return self._with(kind, _Span(now, 1)), why

    def _with(self, kind: str, span: _Span) -> Self:
        return replace(self, _spans={**self._spans, kind: span})
