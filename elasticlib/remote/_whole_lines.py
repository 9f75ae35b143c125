"""
Output of workers in whole lines, although it arrives in pieces. Pure.

Rules of this file: bytes are kept in their order, and none is lost. A piece never ends within a character of UTF-8.
"""

from __future__ import annotations

import codecs

from attrs import define

_LONGEST = 2**16
"""Bytes of a line without end; more are not kept back."""
_LONGEST_CHARACTER = 4


@define
class WholeLines:
    """The open line of a stream that others are shown beside."""

    _open: bytes = b""

    @property
    def is_open(self) -> bool:
        """True if a line has begun and has no end yet."""
        return bool(self._open)

    def add(self, data: bytes) -> bytes:
        """Return the lines that *data* ends; a progress bar's line ends with each of its states."""
        text = self._open + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if end == 0 and len(text) > _LONGEST:
            end = _end_of_characters(text)
        self._open = text[end:]
        return text[:end]

    def rest(self, *, is_last: bool = False) -> bytes:
        """Return the open line, which its writer may go on later; all of it if it *is_last*."""
        end = len(self._open) if is_last else _end_of_characters(self._open)
        text, self._open = self._open[:end], self._open[end:]
        return text


def _end_of_characters(text: bytes) -> int:
    """Return the length of *text* without a character of UTF-8 that has only begun."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-_LONGEST_CHARACTER:])
    begun, _ = decoder.getstate()
    return len(text) - len(begun)
