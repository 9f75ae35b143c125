r"""
Where in a worker's output something richer than text belongs: a figure, or a progress bar that changes. Pure.

Rules of this file: a mark is what a terminal does not show (an application program command, ECMA-48), before and after
the text that stands for the object where only text is shown; it is one line, so that lines of other workers come before
or after it. It tells where the object is, and bears a word that only this launch knows: what a program prints of
others' data is never taken for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = "elasticlib"
_ANY = re.compile(rf"\x1b_{_NAME};[^\x1b]*\x1b\\([^\x1b]*)\x1b_{_NAME};[^\x1b]*\x1b\\")
# One for all launches: Python keeps hundreds of expressions that were compiled, the user's among them.
_WHOLE = re.compile(
    rf"\x1b_{_NAME};([^\x1b;]*);(?:bar;(\d+);([01]);([0-9a-f]*);([0-9a-f]*)\x1b\\\n"
    rf"|(\d+);(\d+);([01]);([^\x1b]*)\x1b\\([^\x1b]*)\x1b_{_NAME};\1\x1b\\\n)"
)
_LABEL = re.compile(r"^\[\d+\] \Z", re.MULTILINE)
"""Tells which rank wrote a line; above what only changes an object it would stand for nothing."""
_LONGEST_REST = 1 << 16
"""Characters that may be held back for the rest of a mark."""
_MOST_TEXT = 1 << 14
"""Characters of text that stand for an object."""
_NEWLINE = "\v"
"""Stands for it within a mark."""


@dataclass(frozen=True)
class Mark:
    """An object: *length* bytes at *offset* of the file *path*; *text* stands for it."""

    path: str
    offset: int
    length: int
    text: str
    is_new: bool = True
    """Whether it takes a place of its own, and changes none that is there."""


@dataclass(frozen=True)
class Bar:
    """A state of a progress bar."""

    label: str
    """Stands before it, and before all lines of its worker."""
    number: int
    """Which of that worker's it is, counted from the first one."""
    state: str
    """Empty: there is nothing to be seen of it now."""
    is_last: bool
    """Whether it changes no more."""


_LONGEST_STATE = 4096
"""Bytes of a bar's state; a cell shows no more of it."""


def written_bar(word: str, label: bytes, number: int, state: bytes, is_last: bool) -> bytes:
    """The line of output for a state of a bar of the launch that has this *word*."""
    # In hex: a state may hold any bytes, those that end a mark too.
    shown = state[:_LONGEST_STATE].hex()
    return f"\x1b_{_NAME};{word};bar;{number};{is_last:d};{label.hex()};{shown}\x1b\\\n".encode()


def written(word: str, mark: Mark) -> str:
    """The line of output for *mark* of the launch that has this *word*."""
    text = mark.text[:_MOST_TEXT].replace("\r", "").replace("\x1b", "").replace("\n", _NEWLINE)
    where = f"{mark.offset};{mark.length};{mark.is_new:d};{mark.path}"
    return f"\x1b_{_NAME};{word};{where}\x1b\\{text}\x1b_{_NAME};{word}\x1b\\\n"


def without(text: str) -> str:
    """*text* without marks, of any launch: with what stands for their objects."""
    return _ANY.sub(lambda found: found[1].replace(_NEWLINE, "\n"), text) if _NAME in text else text


class Reader:
    """Finds the marks of the launch with this *word* in text that comes in pieces."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._head = f"\x1b_{_NAME};{word};"
        self._rest = ""

    def feed(self, text: str) -> Iterator[str | Mark | Bar]:
        """What *text* brings, in its order; what may be the begin of a mark comes with its rest."""
        text = self._rest + text
        at = 0
        for found in _WHOLE.finditer(text):
            word, number, is_last, label, state, *mark = found.groups()
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
        """Where what is to be held back begins."""
        begin = text.find(self._head, at)
        if begin < 0:
            last = text.rfind("\x1b", at)
            begin = last if last >= 0 and self._head.startswith(text[last:]) else len(text)
        return begin if len(text) - begin <= _LONGEST_REST else len(text)


def _text(code: str) -> str:
    return bytes.fromhex(code).decode("utf-8", "replace")
