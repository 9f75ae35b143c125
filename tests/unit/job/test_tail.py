"""The last lines of a long output, as a terminal would show them, in bounded memory."""

from __future__ import annotations

import sys

import pytest

from elasticlib.notebook._displays import Tail


def lines_of(*texts: str) -> list[str]:
    tail = Tail()
    for text in texts:
        tail.feed(text)
    return tail.text("/logs").splitlines()


def test_the_last_lines_are_shown_and_the_others_counted() -> None:
    heading, *lines = lines_of("".join(f"line {number}\n" for number in range(100)))

    assert heading == "[... lines left out here: 80; the full output is in /logs]"
    assert lines == [f"line {number}" for number in range(80, 100)]


def test_tail_is_the_same_for_any_pieces_of_the_text() -> None:
    text = "".join(f"line {number}\n" for number in range(100)) + "the end"

    assert lines_of(text) == lines_of(*text) == lines_of(*text.splitlines(keepends=True))
    assert lines_of(text)[-1] == "the end"
    assert len(lines_of(text)) == 21


def test_no_lines_are_counted_if_none_are_left_out() -> None:
    assert lines_of("one\n", "two") == ["[the full output is in /logs]", "one", "two"]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["\r 10%|#", "\r 20%|##"], " 20%|##"),
        (["10%\r", "20%\r"], "20%"),
        (["windows\r\n"], "windows"),
        (["a\r", "\n"], "a"),
        (["\x1b[31mred\x1b[0m \x1b[2Kcleared"], "\x1b[31mred\x1b[0m cleared"),
    ],
    ids=["a bar", "its end", "two characters", "in two pieces", "colours"],
)
def test_a_line_is_what_a_terminal_shows_of_it(texts: list[str], shown: str) -> None:
    assert lines_of(*texts)[-1] == shown


def test_tail_is_changed_only_after_new_text() -> None:
    tail = Tail()
    states = [tail.is_changed]
    tail.feed("")
    states.append(tail.is_changed)
    tail.feed("x")
    states.append(tail.is_changed)
    tail.text("/logs")

    assert [*states, tail.is_changed] == [False, False, True, False]


def test_its_memory_is_bounded() -> None:
    tail = Tail()
    for _ in range(50):
        tail.feed("x" * 100_000)  # one line that never ends
        tail.feed("\r" + "y" * 100_000)
    tail.feed("z" * 100_000 + "\n" * 100)

    assert sum(map(sys.getsizeof, [*tail._lines, tail._open])) < 50_000
