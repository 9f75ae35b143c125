r"""
Whole lines out of a worker's bytes, each with its prefix, as a terminal would show them.

Rules of this file: pure; bytes in, bytes out, time is an argument. How the input is cut into chunks does
not change the output. Bytes are never decoded to decide where a line ends, hence any encoding passes.
``\r\n`` ends a line and is kept. Text that ``\r`` rewrites comes out once, at its newline, as it then stands;
while no newline comes, its present state comes out as a line of its own at most once a second. A line longer
than the limit comes out in pieces of that length, each a line of its own.
"""

from __future__ import annotations

import re

LONGEST_LINE = 1 << 20
"""Bytes of a line without end that are kept back before they go out as a line of their own."""

REWRITE_PERIOD = 1.0
"""Seconds between two states of a line that is being rewritten."""

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASE = re.compile(rb"\x1b\[[02]?K")


class LineAssembler:
    """The open line of one stream; `feed` it what was read and write what it returns."""

    def __init__(self, prefix: bytes, longest_line: int = LONGEST_LINE) -> None:
        self.due: float | None = None
        """When `tick` has something to say; None while no rewritten text waits."""
        self._prefix = prefix
        self._longest = longest_line
        self._open = bytearray()
        """Bytes of the open line since its last ``\\r``; a ``\\r`` that may yet be half of ``\\r\\n`` ends it."""
        self._under: bytes | None = None
        """What the ended rewrites of the open line left on the screen; None when it was never rewritten."""
        self._shown: bytes | None = None

    @property
    def is_open(self) -> bool:
        """Whether a line has begun that has no end yet."""
        return bool(self._open) or self._under is not None

    def feed(self, data: bytes, now: float) -> bytes:
        """Take *data*; return the whole lines that it ended. *now* is in seconds."""
        if len(data) > self._longest:
            return self._feed_in_parts(data, now)
        is_rewritten = self._under is not None or self._open.endswith(b"\r")
        # A "\r" is rare, so that its lines are not counted for most data.
        if is_rewritten or (b"\r" in data and data.count(b"\r") != data.count(b"\r\n")):
            return self._feed_rewritten(data, now)
        end = data.rfind(b"\n")
        if end < 0:
            self._open += data
            return self._overflow()
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
        if was_shown or not state.strip():
            return b""
        self._shown = state
        return self._line(state)

    def _rewritten_state(self) -> bytes:
        if self._open.endswith(b"\r"):
            return self._seen(bytes(self._open[:-1]))
        return self._under or b""

    def finish(self) -> bytes:
        """The last line, when it has no newline: it gets one. What is fed after it begins a new line."""
        rewritten = self._under is not None or self._open.endswith(b"\r")
        state = self._seen(bytes(self._open).removesuffix(b"\r"))
        shown = self._shown
        self._open.clear()
        self._under = self._shown = self.due = None
        if rewritten and (state == shown or not state.strip()):
            return b""
        return self._line(state) if state else b""

    def take(self) -> bytes:
        """The open line, which was never rewritten, and is another's from now on."""
        taken = bytes(self._open)
        self._open.clear()
        return taken

    def _line(self, text: bytes, end: bytes = b"\n") -> bytes:
        return self._prefix + text + end

    def _overflow(self) -> bytes:
        """Send off what is too long to wait for its newline."""
        out = b""
        while len(self._open) > self._longest:
            out += self._line(self._seen(bytes(self._open[: self._longest])))
            del self._open[: self._longest]
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
        is_incomplete = rest.endswith(b"\r")
        before = self._under
        out.append(self._rewrite(rest.removesuffix(b"\r")))
        if is_incomplete:
            self._open += b"\r"
        if self.due is None and (is_incomplete or self._under != before):
            self.due = now + REWRITE_PERIOD
        return b"".join(out)

    def _rewrite(self, text: bytes) -> bytes:
        """Make *text*, in which every ``\\r`` rewrites, the open line; return pieces that were too long."""
        *ended, last = text.split(b"\r")
        out = b""
        if ended:
            is_plain = b"\x1b" not in text
            out = self._write_over(ended, is_plain=is_plain)
        self._open[:] = last
        return out + self._overflow()

    def _write_over(self, states: list[bytes], *, is_plain: bool) -> bytes:
        """Write *states* over the open line, one after the other; return pieces that were too long."""
        newest = states[-1]
        if is_plain and self._covers_all(newest, states):
            # No loop over states that nobody will see.
            self._under = newest
            return b""
        out = b""
        for state in states:
            self._open[:] = state
            out += self._overflow()
            self._under = overtype(self._under or b"", bytes(self._open))
        return out

    def _covers_all(self, newest: bytes, states: list[bytes]) -> bool:
        """Return True where nothing of older states stays beside *newest*, as with most bars."""
        widest = max(len(self._under or b""), *map(len, states))
        if widest > self._longest or len(newest) < widest:
            return False
        return newest.isascii()


class Verbatim:
    """The bytes of one stream as they are, for a console that is its alone; with what `LineAssembler` offers."""

    due: float | None = None
    is_open = False

    def feed(self, data: bytes, now: float) -> bytes:
        """All of it."""
        return data

    def tick(self, now: float) -> bytes:
        """Nothing."""
        return b""

    def finish(self) -> bytes:
        """Nothing: a line without end stays one."""
        return b""


def overtype(old: bytes, new: bytes) -> bytes:
    """
    Return what a terminal shows of *old* after *new* was written over it from the first column.

    Colours have no width, and "erase line" takes the rest of *old* away. The rest of *old* that stays beside
    *new* loses its colours, hence text that is rewritten for ever does not grow.
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
    """Return True where each byte of *text* is a column."""
    return text.isascii() and b"\x1b" not in text


def _plain(text: bytes) -> str:
    return _ESCAPE.sub("", text.decode("utf-8", "surrogateescape"))
