"""Whole lines of workers' output from pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.remote._whole_lines import WholeLines

PIECES = st.lists(st.binary(max_size=12) | st.text("aä€😀\r\n", max_size=5).map(str.encode), max_size=30)


def test_lines_are_whole_however_they_arrive() -> None:
    lines = WholeLines()

    assert [b"", b"one\n", b"two\nthree\n", b""] == [
        lines.add(piece) for piece in (b"on", b"e\ntw", b"o\nthree\nf", b"")
    ]
    assert lines.is_open and b"f" == lines.rest() and not lines.is_open


def test_states_of_a_progress_bar_are_not_kept_back() -> None:
    assert b"\r10%\r" == WholeLines().add(b"\r10%\r20%")


def test_line_without_end_is_not_kept_back_forever() -> None:
    lines = WholeLines()

    assert b"" == lines.add(b"x" * 2**16)
    assert 2**16 + 1 == len(lines.add(b"x"))


@pytest.mark.parametrize("character", ["ä", "€", "😀"])
def test_character_is_not_divided(character: str) -> None:
    lines = WholeLines()
    data = character.encode()
    for size in range(1, len(data)):
        lines.add(b"a" + data[:size])
        assert b"a" == lines.rest()
        lines.add(data[size:])
        assert character == lines.rest().decode()


@given(PIECES)
def test_all_bytes_arrive_in_their_order(pieces: list[bytes]) -> None:
    lines = WholeLines()
    shown = []
    for piece in pieces:
        shown += [lines.add(piece), lines.rest()]
    shown.append(lines.rest(is_last=True))

    assert b"".join(pieces) == b"".join(shown)
    assert not lines.is_open
