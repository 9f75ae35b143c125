"""Marks of displayed objects in a worker's output: found whatever the pieces it comes in, and never forged."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.notebook._marks import Bar, Mark, Reader, without, written, written_bar

WORD = "0123456789abcdef"
marks = st.builds(
    Mark,
    st.text("abc/;é ", max_size=20),
    st.integers(0, 10**12),
    st.integers(0, 10**9),
    st.text("ab\n;[]é", max_size=50),
    st.booleans(),
)
bars = st.builds(Bar, st.text("[0] é", max_size=5), st.integers(0, 10**6), st.text(max_size=50), st.booleans())
plain = st.text("ab\n;é", max_size=30)


def text_of(part: str | Mark | Bar) -> str:
    """Return the text that a worker or the tee writes for *part*."""
    if isinstance(part, Bar):
        label, state = part.label.encode(), part.state.encode()
        return written_bar(WORD, label, part.number, state, part.is_last).decode()
    return written(WORD, part) if isinstance(part, Mark) else part


def read(pieces: list[str]) -> list[str | Mark | Bar]:
    """Return the texts, marks and bars that a reader finds in *pieces*; join adjacent texts."""
    reader, found = Reader(WORD), list[str | Mark | Bar]()
    for piece in pieces:
        for part in reader.feed(piece):
            if found and isinstance(part, str) and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
    return found


@given(st.lists(st.one_of(plain, marks, bars), max_size=8), st.data())
def test_marks_and_text_keep_their_order_however_they_are_split(
    parts: list[str | Mark | Bar], data: st.DataObject
) -> None:
    whole = "".join(map(text_of, parts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    expected = list[str | Mark | Bar]()
    for part in parts:
        if isinstance(part, str) and expected and isinstance(expected[-1], str):
            expected[-1] += part
        elif part:
            expected.append(part)
    assert read(pieces) == expected


@given(marks)
def test_without_marks_the_text_stays_that_stands_for_the_objects(mark: Mark) -> None:
    assert without(f"a\n{written(WORD, mark)}b") == f"a\n{mark.text}\nb"
    assert without("no mark") == "no mark"


def test_a_mark_of_others_is_text() -> None:
    forged = written("another word", Mark("/etc/passwd", 0, 100, "text"))

    assert read([forged]) == [forged]


def test_no_launch_leaves_an_expression_in_pythons_store_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for 512, and a kernel that launches all day would hold one for each, in place of its user's."""
    mark = Mark("path", 0, 100, "text")
    monkeypatch.setattr("re.compile", None)

    assert read([written(WORD, mark)]) == [mark]


def test_text_that_begins_like_a_mark_is_not_kept_back_for_ever() -> None:
    begun = f"\x1b_elasticlib;{WORD};0;1;1;"

    assert read([begun, "x" * (1 << 16)]) == [begun + "x" * (1 << 16)]
    assert read(["\x1b[31mred\x1b[0m\n"]) == ["\x1b[31mred\x1b[0m\n"]


def test_a_label_stands_above_a_new_object_only() -> None:
    new, change = Mark("p", 0, 1, "", True), Mark("p", 1, 1, "", False)

    assert read([f"a\n[0] {written(WORD, new)}[1] {written(WORD, change)}[2] b\n"]) == [
        "a\n[0] ",
        new,
        change,
        "[2] b\n",
    ]
