"""Line assembly: whole lines only, nothing lost, as a terminal would show it."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, strategies as st

from elasticlib.logs._lines import LONGEST_LINE, REWRITE_PERIOD, LineAssembler, overtype

PREFIX = b"[w0]:"

# Few symbols, so that line ends, rewrites and escapes meet often.
symbols = [b"\n", b"\r", b"\r\n", b"a", b"bc", b"\xc3\xa9", b"\xff", b" ", b"\x1b[K", b"\x1b[1m"]
texts = st.lists(st.sampled_from(symbols)).map(b"".join)
plain_texts = st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bc", b"\xff", b"\x1b[K"])).map(b"".join)


def assemble(chunks: list[bytes], longest_line: int = LONGEST_LINE) -> bytes:
    lines = LineAssembler(PREFIX, longest_line)
    return b"".join([lines.feed(chunk, 0.0) for chunk in chunks]) + lines.finish()


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(text=texts, places=st.lists(st.integers(0, 200), max_size=8), longest_line=st.sampled_from([1, 2, 3, 7, 1000]))
@example(text=b"ab\r\n", places=[3], longest_line=1000)
@example(text=b"a\x1b[K\nb\rc\n", places=[5], longest_line=1000)
def test_how_the_input_is_cut_does_not_change_the_output(text: bytes, places: list[int], longest_line: int) -> None:
    assert assemble([text], longest_line) == assemble(cut(text, places), longest_line)


@given(text=plain_texts, places=st.lists(st.integers(0, 200), max_size=8))
def test_text_without_rewriting_is_written_unchanged_after_its_prefix(text: bytes, places: list[int]) -> None:
    lines = text.split(b"\n")
    expected = b"".join([PREFIX + line + b"\n" for line in lines[:-1]])
    last = lines[-1].removesuffix(b"\r")
    expected += PREFIX + last + b"\n" if last else b""

    assert expected == assemble(cut(text, places))


@given(text=texts, longest_line=st.sampled_from([1, 3, 1000]))
def test_each_output_line_has_the_prefix_and_an_end(text: bytes, longest_line: int) -> None:
    out = assemble([text], longest_line)

    assert out == b"" or out.endswith(b"\n")
    assert all(line.startswith(PREFIX) for line in out.split(b"\n")[:-1])


@given(text=st.lists(st.sampled_from([b"\n", b"a", b"bcd", b"\xff" * 9])).map(b"".join), longest_line=st.integers(1, 9))
@example(text=b"abcd\n", longest_line=3)
def test_long_line_is_written_in_pieces_of_the_limit(text: bytes, longest_line: int) -> None:
    out = assemble([text], longest_line)

    pieces = [
        line[at : at + longest_line] for line in text.split(b"\n") for at in range(0, max(1, len(line)), longest_line)
    ]
    if not text or text.endswith(b"\n"):
        pieces.pop()
    assert b"".join([PREFIX + piece + b"\n" for piece in pieces]) == out


def test_a_line_without_end_keeps_no_more_than_the_limit() -> None:
    lines = LineAssembler(b"", longest_line=100)

    sent = b"".join([lines.feed(b"x" * 30, 0.0) for _ in range(1000)])

    assert len(sent.replace(b"\n", b"")) >= 30_000 - 100


def test_line_in_two_parts_is_written_once() -> None:
    lines = LineAssembler(PREFIX)

    first = lines.feed(b"abc", 0.0)
    second = lines.feed(b"def\n", 0.0)

    assert (b"", b"[w0]:abcdef\n") == (first, second)


def test_a_last_line_without_newline_gets_one() -> None:
    assert b"[w0]:a\n[w0]:b\n" == assemble([b"a\nb"])


def test_bytes_of_no_encoding_pass() -> None:
    assert b"[w0]:\xff\xfe\x00\n[w0]:\x80\n" == assemble([b"\xff\xfe\x00\n\x80\n"])


def test_carriage_return_and_newline_are_one_line_end_also_when_read_apart() -> None:
    assert b"[w0]:a\r\n[w0]:b\r\n" == assemble([b"a\r", b"\nb\r\n"])


def test_rewritten_text_is_written_once_in_its_state_at_newline() -> None:
    assert b"[w0]:100%\n[w0]:next\n" == assemble([b"\r  1%\r 50%", b"\r100%\nnext\n"])


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (b"abcdef", b"xy", b"xycdef"),
        (b"abc", b"", b"abc"),
        (b"abc", b"\x1b[Kx", b"x"),
        (b"abc", b"\x1b[2Kx", b"x"),
        (b"abc", b"\x1b[1mx\x1b[0m", b"\x1b[1mx\x1b[0mbc"),
        (b"\x1b[1mabc\x1b[0m", b"x", b"xbc"),
        ("█▋ab".encode(), "█".encode(), "█▋ab".encode()),
        (b"\xff\xfeab", b"\xfd", b"\xfd\xfeab"),
    ],
)
def test_shorter_text_leaves_the_rest_of_the_older_text_to_be_seen(old: bytes, new: bytes, shown: bytes) -> None:
    assert shown == overtype(old, new)


@given(parts=st.lists(texts.map(lambda text: text.replace(b"\n", b"").replace(b"\r", b"")), min_size=2, max_size=6))
def test_many_rewrites_at_once_show_what_one_after_the_other_shows(parts: list[bytes]) -> None:
    parts[-1] += b"z"  # else the last rewrite and the newline are one line end
    shown = b""
    for part in parts:
        shown = overtype(shown, part)

    assert PREFIX + shown + b"\n" == assemble([b"\r".join(parts) + b"\n"])


def test_rewritten_text_without_newline_shows_its_state_once_a_second() -> None:
    lines = LineAssembler(PREFIX)
    seen = []

    for hundredth in range(301):
        now = hundredth / 100
        assert b"" == lines.feed(b"%d%%\r" % hundredth, now)
        seen.append(lines.tick(now))

    assert [b"[w0]:100%\n", b"[w0]:201%\n"] == [state for state in seen if state]


def test_a_state_that_was_shown_is_not_shown_again() -> None:
    lines = LineAssembler(PREFIX)
    lines.feed(b"50%\r", 0.0)

    shown = lines.tick(REWRITE_PERIOD)

    assert b"[w0]:50%\n" == shown
    assert lines.due is None
    assert b"" == lines.tick(5.0) == lines.finish()


def test_a_progress_bar_that_clears_itself_leaves_no_line() -> None:
    assert b"" == assemble([b"\r50%\r   \r"])


def test_nothing_is_due_while_no_text_was_rewritten() -> None:
    lines = LineAssembler(PREFIX)

    lines.feed(b"a\r\nb\nopen", 0.0)

    assert lines.due is None


def test_nothing_is_due_after_the_newline_of_rewritten_text() -> None:
    lines = LineAssembler(PREFIX)

    lines.feed(b"1%\r2%", 0.0)
    due = lines.due
    lines.feed(b"\n", 0.5)

    assert REWRITE_PERIOD == due
    assert lines.due is None


def test_rewrites_that_add_escapes_for_ever_do_not_grow() -> None:
    lines = LineAssembler(b"", longest_line=100)
    lines.feed(b"x" * 90, 0.0)

    for _ in range(1000):
        lines.feed(b"\r\x1b[1m", 0.0)

    assert len(lines.finish()) <= 101


def test_bulk_lines_pass_at_a_hundred_megabytes_a_second() -> None:
    lines = LineAssembler(b"[default0]:")
    block = (b"x" * 79 + b"\n") * 3276
    best = 1.0

    for _ in range(20):
        start = time.thread_time()
        lines.feed(block, 0.0)
        best = min(best, time.thread_time() - start)

    assert len(block) / best > 100e6
