r"""
Assembly of whole lines from a worker's bytes, each with its prefix, as a terminal would show them.

Rules of this file: pure; bytes in, bytes out, time is an argument. The division of the input into chunks
does not change the output. Line ends are found in bytes, without decoding, so any encoding passes.

* ``\r\n`` ends a line and is kept.
* Text that ``\r`` rewrites is output once, at its newline, in its final state. Before the newline, its
  present state is output as a separate line, at most once a second.
* A line longer than the limit is output in pieces of the limit's length, each as a separate line.
"""

from __future__ import annotations

import re

# Memory holds the open line of each stream, which may never end.
LONGEST_LINE = 1 << 20
"""Maximum bytes of a line without end; more are output as a separate line."""

REWRITE_PERIOD = 1.0
"""Seconds between two states of a line that is being rewritten."""

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASE = re.compile(rb"\x1b\[[02]?K")


class LineAssembler:
    """The open line of one stream; `feed` takes bytes from the stream and returns output to write."""

    def __init__(self, prefix: bytes, longest_line: int = LONGEST_LINE) -> None:
        self.due: float | None = None
        """Time at which `tick` has output, in seconds; None while no rewritten text waits."""
        self._prefix = prefix
        self._longest = longest_line
        self._open = bytearray()
        """Bytes of the open line since its last ``\\r``, with a final ``\\r`` that may be half of ``\\r\\n``."""
        self._under: bytes | None = None
        """Text of the open line on the screen before its last ``\\r``; None if it was never rewritten."""
        self._shown: bytes | None = None

    @property
    def is_open(self) -> bool:
        """True if a line has begun and has no end yet."""
        return bool(self._open) or self._under is not None

    def feed(self, data: bytes, now: float) -> bytes:
        """Process *data*, and return the lines that it completed. *now* is in seconds."""
        if len(data) > self._longest:
            return self._feed_in_parts(data, now)

        is_rewritten = self._under is not None or self._open.endswith(b"\r")

        # A "\r" is rare, so counting is skipped for most data.
        if is_rewritten or (b"\r" in data and data.count(b"\r") != data.count(b"\r\n")):
            return self._feed_rewritten(data, now)

        end = data.rfind(b"\n")
        if end < 0:
            self._open += data
            return self._overflow()

        # The first line has become too long in two parts: the slow way cuts it into pieces.
        if len(self._open) + data.find(b"\n") > self._longest:
            return self._feed_rewritten(data, now)

        lines = data[:end].replace(b"\n", b"\n" + self._prefix)
        whole = b"".join((self._prefix, self._open, lines, b"\n"))
        self._open[:] = data[end + 1 :]
        return whole

    def _feed_in_parts(self, data: bytes, now: float) -> bytes:
        parts = range(0, len(data), self._longest)
        return b"".join([self.feed(data[at : at + self._longest], now) for at in parts])

    def tick(self, now: float) -> bytes:
        """Return the present state of rewritten text as a line, if it is due and was not shown yet."""
        if self.due is None or now < self.due:
            return b""

        self.due = None
        state = self._rewritten_state()
        was_shown = state == self._shown

        # A bar that clears itself leaves blanks, which are no state to show.
        if was_shown or not state.strip():
            return b""

        self._shown = state
        return self._line(state)

    def _rewritten_state(self) -> bytes:
        # A final "\r" is no text: it rewrites the line, or is half of its end.
        if self._open.endswith(b"\r"):
            return self._seen(bytes(self._open[:-1]))
        return self._under or b""

    def finish(self) -> bytes:
        """Return the open line with a newline, or nothing. The next data begins a new line."""
        rewritten = self._under is not None or self._open.endswith(b"\r")
        state = self._seen(bytes(self._open).removesuffix(b"\r"))
        shown = self._shown
        self._open.clear()
        self._under = self._shown = self.due = None
        # Its last state was output already, or the bar has cleared itself.
        if rewritten and (state == shown or not state.strip()):
            return b""
        return self._line(state) if state else b""

    def take(self) -> bytes:
        """Remove and return the open line, which was never rewritten."""
        taken = bytes(self._open)
        self._open.clear()
        return taken

    def _line(self, text: bytes, end: bytes = b"\n") -> bytes:
        return self._prefix + text + end

    def _overflow(self) -> bytes:
        """Return and remove the pieces of the open line that exceed the limit."""
        out = b""
        while len(self._open) > self._longest:
            out += self._line(self._seen(bytes(self._open[: self._longest])))
            del self._open[: self._longest]
            # The piece covered what was below; the rest of the line still counts as rewritten.
            self._under = b"" if self._under is not None else None
        return out

    def _seen(self, text: bytes) -> bytes:
        return text if self._under is None else overtype(self._under, text)

    def _feed_rewritten(self, data: bytes, now: float) -> bytes:
        *lines, rest = (bytes(self._open) + data).split(b"\n")
        out = []
        for line in lines:
            end = b"\r\n" if line.endswith(b"\r") else b"\n"
            out.append(self._rewrite(line.removesuffix(b"\r")))
            out.append(self._line(self._seen(bytes(self._open)), end))
            self._open.clear()
            self._under = self._shown = self.due = None

        # It may be the first half of "\r\n".
        is_incomplete = rest.endswith(b"\r")
        before = self._under
        out.append(self._rewrite(rest.removesuffix(b"\r")))
        if is_incomplete:
            self._open += b"\r"
        if self.due is None and (is_incomplete or self._under != before):
            self.due = now + REWRITE_PERIOD
        return b"".join(out)

    def _rewrite(self, text: bytes) -> bytes:
        """Replace the open line by *text*, in which every ``\\r`` rewrites; return pieces that were too long."""
        *ended, last = text.split(b"\r")
        out = b""
        if ended:
            is_plain = b"\x1b" not in text
            out = self._write_over(ended, is_plain=is_plain)
        self._open[:] = last
        return out + self._overflow()

    def _write_over(self, states: list[bytes], *, is_plain: bool) -> bytes:
        """Write *states* over the open line in turn; return pieces that were too long."""
        newest = states[-1]
        if is_plain and self._covers_all(newest, states):
            # Older states are invisible, so the loop is skipped.
            self._under = newest
            return b""

        out = b""
        for state in states:
            self._open[:] = state
            out += self._overflow()
            self._under = overtype(self._under or b"", bytes(self._open))

        return out

    def _covers_all(self, newest: bytes, states: list[bytes]) -> bool:
        """Return True if no part of older states stays visible beside *newest*, as with most bars."""
        widest = max(len(self._under or b""), *map(len, states))
        if widest > self._longest or len(newest) < widest:
            return False
        return newest.isascii()


class Verbatim:
    """The unchanged bytes of a console's only stream, with the methods of `LineAssembler`."""

    due: float | None = None
    is_open = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Return *data* unchanged."""
        return data

    def tick(self, now: float) -> bytes:
        """Return nothing: no text waits."""
        return b""

    def finish(self) -> bytes:
        """Return nothing: a line without end gets no newline."""
        return b""


def overtype(old: bytes, new: bytes) -> bytes:
    """
    Return the text that a terminal shows after *new* was written over *old* from the first column.

    Colours have no width, and "erase line" removes the rest of *old*. The rest of *old* that stays beside
    *new* loses its colours, so that text does not grow with the number of rewrites.
    """
    if not old:
        return _ERASE.sub(b"", new)
    if not new:
        return old

    covers_all = _is_plain(new) and len(new) >= len(old)
    if covers_all:
        return new
    if _ERASE.search(new):
        return _ERASE.sub(b"", new)

    width = len(_plain(new))
    return new + _plain(old)[width:].encode("utf-8", "surrogateescape")


def _is_plain(text: bytes) -> bool:
    """Return True if each byte of *text* is one column."""
    return text.isascii() and b"\x1b" not in text


def _plain(text: bytes) -> str:
    return _ESCAPE.sub("", text.decode("utf-8", "surrogateescape"))
