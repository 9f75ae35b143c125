r"""
Marks in a worker's output for figures and for progress bars that change. Pure.

Rules of this file: a mark consists of control strings that a terminal does not show (application program
commands, ECMA-48). They enclose the text that replaces the object if only text can be shown. A mark is
one line, so that lines of other workers come before or after it. It holds the place of the object and a
word that only this launch knows. So other data that a program prints is never mistaken for a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = "elasticlib"
_ANY = re.compile(rf"\x1b_{_NAME};[^\x1b]*\x1b\\([^\x1b]*)\x1b_{_NAME};[^\x1b]*\x1b\\")
# One expression for all launches: Python caches compiled expressions, also the user's, up to a limit.
_WHOLE = re.compile(
    rf"\x1b_{_NAME};([^\x1b;]*);(?:bar;(\d+);([01]);([0-9a-f]*);([0-9a-f]*)\x1b\\\n"
    rf"|(\d+);(\d+);([01]);([^\x1b]*)\x1b\\([^\x1b]*)\x1b_{_NAME};\1\x1b\\\n)"
)
_LABEL = re.compile(r"^\[\d+\] \Z", re.MULTILINE)
"""Prefix of a line that names its rank; removed before a mark that only changes an existing object."""
# A longer beginning is most likely not a mark: the text after it must not wait for the end.
_LONGEST_REST = 1 << 16
"""Maximum number of characters that wait for the rest of a mark."""
_MOST_TEXT = 1 << 14
"""Maximum number of characters of the text that replaces an object."""
_NEWLINE = "\v"
"""Replacement of newlines within a mark."""


@dataclass(frozen=True)
class Mark:
    """An object: *length* bytes at *offset* of the file *path*; *text* replaces it where only text is shown."""

    path: str
    offset: int
    length: int
    text: str
    is_new: bool = True
    """True if it is a new output; False if it changes an existing one."""


@dataclass(frozen=True)
class Bar:
    """A state of a progress bar."""

    label: str
    """Prefix of the bar and of all lines of its worker."""
    number: int
    """Number of the bar among those of its worker, in the order of their start."""
    state: str
    """Text of the bar; empty if it is invisible now."""
    is_last: bool
    """True for the last state of the bar."""


_LONGEST_STATE = 4096
"""Maximum bytes of a bar's state in a cell."""


def written_bar(word: str, label: bytes, number: int, state: bytes, is_last: bool) -> bytes:
    """Return the line of output for a state of a bar; *word* belongs to the launch."""
    # In hex: a state may contain any bytes, also those that end a mark.
    shown = state[:_LONGEST_STATE].hex()
    return f"\x1b_{_NAME};{word};bar;{number};{is_last:d};{label.hex()};{shown}\x1b\\\n".encode()


def written(word: str, mark: Mark) -> str:
    """Return the line of output for *mark*; *word* belongs to the launch."""
    # Inside a mark an escape would end it, and a carriage return would rewrite its line.
    text = mark.text[:_MOST_TEXT].replace("\r", "").replace("\x1b", "").replace("\n", _NEWLINE)
    where = f"{mark.offset};{mark.length};{mark.is_new:d};{mark.path}"
    return f"\x1b_{_NAME};{word};{where}\x1b\\{text}\x1b_{_NAME};{word}\x1b\\\n"


def without(text: str) -> str:
    """Return *text* with the marks of any launch replaced by the texts of their objects."""
    return _ANY.sub(lambda found: found[1].replace(_NEWLINE, "\n"), text) if _NAME in text else text


class Reader:
    """Parser for the marks of the launch with this *word*, in text that arrives in pieces."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._head = f"\x1b_{_NAME};{word};"
        self._rest = ""

    def feed(self, text: str) -> Iterator[str | Mark | Bar]:
        """Yield the parts of *text* in order; a possible beginning of a mark waits for the next text."""
        text = self._rest + text
        at = 0
        for found in _WHOLE.finditer(text):
            word, number, is_last, label, state, *mark = found.groups()

            # The mark of another launch, or what only looks like one, is text like any other.
            if word != self._word:
                continue
            before = text[at : found.start()]
            if mark[2] == "0":
                before = _LABEL.sub("", before)
            if before:
                yield before
            if number is not None:
                yield Bar(_text(label), int(number), _text(state), is_last == "1")
            else:
                offset, length, is_new, path, shown = mark
                yield Mark(path, int(offset), int(length), shown.replace(_NEWLINE, "\n"), is_new == "1")

            at = found.end()

        until = self._open(text, at)
        self._rest = text[until:]
        if until > at:
            yield text[at:until]

    def _open(self, text: str, at: int) -> int:
        """Return the index from which *text* must wait for the rest of a mark; its length if it need not."""
        begin = text.find(self._head, at)
        if begin < 0:
            # The text may end within the head of a mark.
            last = text.rfind("\x1b", at)
            begin = last if last >= 0 and self._head.startswith(text[last:]) else len(text)
        return begin if len(text) - begin <= _LONGEST_REST else len(text)


def _text(code: str) -> str:
    return bytes.fromhex(code).decode("utf-8", "replace")
