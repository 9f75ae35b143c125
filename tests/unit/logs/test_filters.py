"""The second file of matching lines: which lines match, and what becomes of the file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import LogDirError
from elasticlib.logs._console import LineFilter, matching

PREFIX = b"[w0]:"
texts = st.lists(st.sampled_from([b"a", b"b", b"ab", b"[", b"w0", b"\xff", b"\r", b" "])).map(b"".join)


def block(*lines: bytes, prefix: bytes = PREFIX) -> bytes:
    return b"".join([prefix + line + b"\n" for line in lines])


@given(
    lines=st.lists(texts), words=st.lists(texts, min_size=1, max_size=3), prefix=st.sampled_from([b"", PREFIX, b"a"])
)
def test_lines_match_if_their_text_contains_a_filter_text(
    lines: list[bytes], words: list[bytes], prefix: bytes
) -> None:
    expected = [line for line in lines if any(word in line for word in words)]

    assert block(*expected, prefix=prefix) == matching(block(*lines, prefix=prefix), prefix, words)


@pytest.mark.parametrize(
    ("lines", "word", "found"),
    [
        ([b"no", b"w0 is here"], b"w0", [b"w0 is here"]),
        ([b"a [w0]:hit", b"miss"], b"hit", [b"a [w0]:hit"]),
        ([b"done yet?", b"all done"], b"done\n", [b"all done"]),
        ([b"", b"x"], b"", [b"", b"x"]),
    ],
    ids=["only in the prefix", "the prefix in the line", "the end of the line", "the empty word"],
)
def test_filter_text_is_searched_in_the_line_and_its_newline(
    lines: list[bytes], word: bytes, found: list[bytes]
) -> None:
    assert block(*found) == matching(block(*lines), PREFIX, [word])


def test_a_prefix_may_hold_a_newline() -> None:
    assert b"from\n0:hit\n" == matching(b"from\n0:miss\nfrom\n0:hit\n", b"from\n0:", [b"hit"])


def test_lines_of_several_blocks_stand_one_after_the_other_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "filtered"

    lines = LineFilter(str(path), ["café", "err"])
    lines.copy(block("un café".encode(), b"other"), PREFIX)
    lines.copy(block(b"error", prefix=b"[w1]:"), b"[w1]:")

    assert "[w0]:un café\n[w1]:error\n" == path.read_text("utf-8")


def test_a_filter_without_a_match_leaves_an_empty_file(tmp_path: Path) -> None:
    lines = LineFilter(str(tmp_path / "filtered"), ["x"])
    lines.copy(block(b"a"), PREFIX)

    assert b"" == (tmp_path / "filtered").read_bytes()


def test_existing_content_of_the_filtered_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "filtered").write_bytes(b"earlier\n")

    lines = LineFilter(str(tmp_path / "filtered"), ["a"])
    lines.copy(block(b"a"), PREFIX)

    assert b"earlier\n[w0]:a\n" == (tmp_path / "filtered").read_bytes()


def test_the_last_who_knows_the_filter_closes_the_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    lines = LineFilter(str(tmp_path / "filtered"), ["a"])
    other = lines

    del lines
    other.copy(block(b"a"), PREFIX)
    del other

    assert block(b"a") == (tmp_path / "filtered").read_bytes()
    assert before == set(os.listdir("/proc/self/fd"))


def test_a_file_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LogDirError, match=r"file for the filtered lines, .*missing/filtered.*, cannot be opened"):
        LineFilter(str(tmp_path / "missing" / "filtered"), ["a"])


def test_full_disk_ends_second_file_with_one_warning_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    lines = LineFilter("/dev/full", ["a"])

    with caplog.at_level(logging.WARNING):
        lines.copy(block(b"a"), PREFIX)
        lines.copy(block(b"a"), PREFIX)

    assert lines.broken is not None
    assert 1 == len(caplog.records)
    assert "/dev/full cannot be written" in caplog.text
