"""Progress bars among whole lines: what goes out of them, when, and that nothing else changes by it."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given, strategies as st

from elasticlib.logs._bar_rows import BAR_PERIOD
from elasticlib.logs._bar_text import BarAssembler
from elasticlib.logs._lines import LONGEST_LINE, LineAssembler

PREFIX = b"[0] "
symbols = [b"\n", b"\r", b"\r\n", b"a", b"bc", b"\xc3\xa9", b"\xff", b" ", b"  ", b"\x1b[K", b"\x1b[1m"]
texts = st.lists(st.sampled_from(symbols)).map(b"".join)
texts_with_nested_bars = st.lists(st.sampled_from([*symbols, b"\x1b[A", b"\x1b[2A", b"\x1b["])).map(b"".join)


def bar(prefix: bytes, number: int, state: bytes, is_last: bool) -> bytes:
    """Return text that stands for a bar in these tests; no line begins like this."""
    return b"<%d%s " % (number, b"!" * is_last) + state + b">\n"


def made(longest_line: int = LONGEST_LINE) -> BarAssembler:
    return BarAssembler(PREFIX, bar, longest_line)


def assemble(chunks: list[bytes], longest_line: int = LONGEST_LINE) -> bytes:
    lines = made(longest_line)
    return b"".join([lines.feed(chunk, 0.0) for chunk in chunks]) + lines.finish()


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def due(lines: BarAssembler) -> float:
    assert lines.due is not None
    return lines.due


@given(text=texts_with_nested_bars, places=st.lists(st.integers(0, 200), max_size=8), longest=st.sampled_from([3, 999]))
@example(text=b"ab\r\n", places=[3], longest=999)
@example(text=b"a\rb\n\rc\x1b[Ad\n", places=[7], longest=999)
def test_how_the_input_is_cut_does_not_change_the_output(text: bytes, places: list[int], longest: int) -> None:
    assert assemble([text], longest) == assemble(cut(text, places), longest)


@given(text=texts, places=st.lists(st.integers(0, 200), max_size=8), longest=st.sampled_from([1, 3, 999]))
@example(text=b"a\r \r\nb", places=[], longest=999)
def test_text_never_shown_as_a_bar_is_printed_as_lines(text: bytes, places: list[int], longest: int) -> None:
    lines = LineAssembler(PREFIX, longest)
    expected = lines.feed(text, 0.0) + lines.finish()

    assert expected == assemble(cut(text, places), longest)


@given(text=texts, places=st.lists(st.integers(0, 200), max_size=8), pauses=st.lists(st.floats(0, 1), min_size=9))
def test_with_their_last_states_bars_are_the_same_lines_in_the_same_order(
    text: bytes, places: list[int], pauses: list[float]
) -> None:
    lines, out, now = made(), b"", 0.0
    for chunk, pause in zip(cut(text, places), pauses, strict=False):
        out += lines.feed(chunk, now)
        now += pause
        out += lines.tick(now)
    out += lines.finish()

    final = re.sub(rb"<\d+ [^\n]*>\n", b"", out)
    final = re.sub(rb"<\d+! ([^\n]*)>\n", rb"[0] \1\n", final)

    def strip_prefixes(lines: bytes) -> list[bytes]:
        return [found for line in lines.split(b"\n") if (found := line.removeprefix(PREFIX).rstrip())]

    assert strip_prefixes(assemble([text])) == strip_prefixes(final)


def test_a_bar_shows_its_newest_state_ten_times_a_second_and_its_last_one() -> None:
    lines = made()

    assert lines.feed(b"\r 0%", 0.0) + lines.feed(b"\r10%", 0.01) == b""
    assert lines.tick(0.05) == b""
    assert lines.tick(due(lines)) == b"<1 10%>\n"
    assert lines.due is None
    lines.feed(b"\r20%", 0.11)
    lines.feed(b"\r100%\n", 0.12)
    assert lines.tick(0.12 + BAR_PERIOD) == b"<1! 100%>\n"
    assert not lines.is_open


def test_states_that_end_with_the_return_are_shown_at_once() -> None:
    lines = made()
    lines.feed(b"10%\r", 0.0)

    assert lines.tick(due(lines)) == b"<1 10%>\n"


def test_all_streams_bars_are_due_at_the_same_moments() -> None:
    first, second = made(), made()
    first.feed(b"\r1", 7.01)
    second.feed(b"\r1", 7.09)

    assert due(first) == due(second) == pytest.approx(7.1)


def test_a_state_that_is_shown_is_not_shown_again() -> None:
    lines = made()
    lines.feed(b"\r1", 0.0)
    lines.tick(due(lines))
    lines.feed(b"\r1", 0.2)

    assert lines.tick(due(lines)) == b""


def test_lines_after_a_bar_wait_for_its_end_and_follow_it() -> None:
    lines = made()
    lines.feed(b"\r1", 0.0)
    lines.tick(due(lines))

    assert lines.feed(b"\r2\nfirst\nsecond\nthird", 0.5) == b""
    assert lines.tick(due(lines)) == b"<1! 2>\n[0] first\n[0] second\n"
    assert lines.feed(b"\n", 1.0) == b"[0] third\n"


def test_a_bar_that_takes_itself_away_leaves_the_line_to_others() -> None:
    lines = made()
    lines.feed(b"\r50%", 0.0)
    lines.tick(due(lines))
    lines.feed(b"\r   \r", 0.2)
    assert lines.tick(due(lines)) == b"<1 >\n"

    lines.feed(b"hi\n", 0.4)
    assert lines.tick(0.6) == b"<1! >\n[0] hi\n"


def test_nested_bars_change_beside_each_other() -> None:
    lines, inner = made(), b"\n\rinner %d\x1b[A"
    lines.feed(b"\router 0" + inner % 0, 0.0)
    assert lines.tick(due(lines)) == b"<1 outer 0>\n<2 inner 0>\n"
    lines.feed(inner % 1, 0.2)
    assert lines.tick(due(lines)) == b"<2 inner 1>\n"
    lines.feed(b"\router 1" + inner % 2, 0.4)
    assert lines.tick(due(lines)) == b"<1 outer 1>\n<2 inner 2>\n"
    lines.feed(b"\n\r       \x1b[A", 0.6)
    assert lines.tick(due(lines)) == b"<2 >\n"

    lines.feed(b"\router 2\nend\n", 0.8)
    assert lines.tick(1.0) == b"<1! outer 2>\n<2! >\n[0] end\n"


def test_between_its_newline_and_its_return_a_bar_has_not_ended() -> None:
    lines = made()
    lines.feed(b"\router\n", 0.0)
    lines.tick(0.05)
    lines.feed(b"\rinner", 0.05)
    lines.feed(b"\x1b[A", 0.06)

    assert lines.tick(due(lines)) == b"<1 outer>\n<2 inner>\n"


def test_more_rows_than_can_be_returned_to_do_not_wait() -> None:
    lines = made()

    assert lines.feed(b"".join(b"\rbar %d\n" % number for number in range(20)), 0.0).count(b"\n") >= 10


def test_the_end_of_a_worker_ends_its_bars() -> None:
    lines = made()
    lines.feed(b"\router\n\rinner\x1b[A", 0.0)
    lines.tick(due(lines))

    assert lines.finish() == b"<1! outer>\n<2! inner>\n"
    assert (lines.due, lines.is_open) == (None, False)
    assert lines.feed(b"line\n", 1.0) == b"[0] line\n"


def test_plain_lines_wait_for_nothing() -> None:
    lines = made()

    assert lines.feed(b"a\r\nb\nc", 0.0) == b"[0] a\r\n[0] b\n"
    assert lines.due is None
