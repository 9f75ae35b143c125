"""
Reading what somebody else wrote: a peer, a stranger, a worker. Pure.

Rules of this file: whatever comes in, what goes out is plain data within bounds or a ``ValueError`` that says what is
wrong; a text that goes out can be printed, logged and written in UTF-8, and does nothing to a terminal. Reading what
was read before changes nothing.
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
"""Environment variable that gives the token of a job, by which its nodes know each other from strangers."""
LARGEST = 2**63 - 1
"""Of whole numbers, and of the other sign: more than anybody counts, and it fits everywhere."""
LONGEST_TIME = 4e9
"""Seconds, a good century: what waits can count them."""
LONGEST_NAME = 300
_DEEPEST = 50

# Besides what moves a terminal's cursor or colours it: what breaks lines elsewhere, turns the order of letters around,
# is not seen at all, or is half a character, which no encoding takes.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINES = re.compile(f"[{_HIDDEN}]")
_IN_LINE = re.compile(f"[\t\n{_HIDDEN}]")


def parse(data: bytes | str, *, constants: bool = False) -> Any:
    """The JSON value that *data* holds; with *constants*, also what Python writes for numbers that are not finite."""
    try:
        return loads(data, parse_constant=float if constants else _no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def parse_shallow(text: str) -> Any:
    """The JSON value that *text* holds, with Python's constants; so flat that whatever walks through it gets there."""
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
    """*value*, if it is of just this type: a bool is an int elsewhere."""
    if type(value) is not kind:
        raise ValueError(f"{shown(value)} should be a {kind.__name__}")
    return value


def whole(value: Any, least: int = -LARGEST, most: int = LARGEST) -> int:
    """A whole number in these bounds."""
    number: int = exactly(value, int)
    if not least <= number <= most:
        raise ValueError(f"{shown(value)} should be a whole number from {least} to {most}")
    return number


def seconds(value: Any, least: float = -LONGEST_TIME, most: float = LONGEST_TIME) -> float:
    """A time that somebody waits, or has waited."""
    if type(value) not in (int, float):
        raise ValueError(f"{shown(value)} should be a number")
    # A number that is not finite lies between no bounds.
    if not least <= value <= most:
        raise ValueError(f"{shown(value)} should be a finite number of seconds from {least:g} to {most:g}")
    return float(value)


def line(value: Any) -> str:
    """A text as one line for people: what is more than that is escaped."""
    return _escaped(exactly(value, str), _IN_LINE)


def lines(value: Any) -> str:
    """A text of any number of lines for people: line ends and tabs stay, all else of that kind is escaped."""
    return _escaped(exactly(value, str), _IN_LINES)


def name(value: Any, most: int = LONGEST_NAME) -> str:
    """What somebody is called, everywhere and in keys: nothing in it needs to be escaped."""
    text: str = exactly(value, str)
    if not 0 < len(text) <= most or _IN_LINE.search(text):
        raise ValueError(f"{shown(value)} is not a name: a name has 1 to {most} printable characters")
    return text


def as_name(text: str) -> str:
    """The *text* of one's own as a name for others."""
    return line(text)[: LONGEST_NAME // 2] or "?"


def shown(value: Any) -> str:
    """The beginning of a value, for people."""
    try:
        return f"{value!r:.40}"
    except (ValueError, RecursionError):
        # ValueError: a number of too many digits. RecursionError: a list in lists without end.
        return f"a {type(value).__name__}"


def _escaped(text: str, what: re.Pattern[str]) -> str:
    # Most texts are printable, and this test is quick.
    if text.isprintable():
        return text
    return what.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@dataclass(frozen=True)
class _Span:
    since: float
    said: int
    unsaid: int = 0


@dataclass(frozen=True)
class Refusals:
    """
    How often it was said lately that something was refused, by kind: whoever writes much must not fill the log.

    The first few of each kind are said, then those of the next span of time, with how many there were between.
    """

    most: int = 5
    """Of one kind in one span."""
    span: float = 60.0
    """Seconds"""
    _spans: Mapping[str, _Span] = field(default_factory=dict)

    def refuse(self, kind: str, why: str, now: float) -> tuple[Self, str | None]:
        """One more of this *kind*, of which there are few; what is to be said of it, if anything."""
        last = self._spans.get(kind)
        if last is not None and now < last.since + self.span and last.said >= self.most:
            return self._with(kind, replace(last, unsaid=last.unsaid + 1)), None
        if last is None or now >= last.since + self.span:
            unsaid, last = 0 if last is None else last.unsaid, _Span(now, 0)
            why += f" ({unsaid} more of this kind were refused before)" if unsaid else ""
        return self._with(kind, replace(last, said=last.said + 1)), why

    def _with(self, kind: str, span: _Span) -> Self:
        return replace(self, _spans={**self._spans, kind: span})
