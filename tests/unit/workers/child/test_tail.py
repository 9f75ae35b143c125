"""The last lines of stderr: noted beside the stream, which stays what it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticlib.workers._failure import last_lines
from elasticlib.workers.child import _report


@pytest.fixture
def note() -> Iterator[int]:
    descriptor = os.memfd_create("tail")
    yield descriptor
    os.close(descriptor)


@contextmanager
def noted(note: int) -> Iterator[None]:
    """While entered, stderr is noted in *note*."""
    former = sys.stderr, sys.__stderr__
    _report.note_stderr(note)
    try:
        yield
    finally:
        sys.stderr, sys.__stderr__ = former  # type: ignore[misc]


def content(note: int) -> bytes:
    return os.pread(note, 10 * _report._MOST_NOTED, 0)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ()),
        ("\n\n", ()),
        ("one\ntwo\n", ("one", "two")),
        ("no end", ("no end",)),
        ("10%\r50%\r100%\ndone\r\n", ("100%", "done")),
        ("".join(f"{number}\n" for number in range(99)), tuple(str(number) for number in range(89, 99))),
    ],
)
def test_the_last_lines_are_those_that_a_reader_saw_last(text: str, lines: tuple[str, ...]) -> None:
    assert last_lines(text) == lines


def test_text_on_stderr_is_noted_and_still_reaches_its_stream(note: int, capfd: pytest.CaptureFixture[str]) -> None:
    with noted(note):
        print("first", file=sys.stderr)
        sys.stderr.write("last")

    assert content(note) == b"first\nlast"
    assert capfd.readouterr().err == "first\nlast"


def test_the_note_keeps_the_newest_and_stays_small(note: int, capfd: pytest.CaptureFixture[str]) -> None:
    with noted(note):
        for number in range(5_000):
            print(f"line {number}", file=sys.stderr)

    assert len(content(note)) <= _report._MOST_NOTED
    assert content(note).endswith(b"line 4998\nline 4999\n")


def test_a_long_text_leaves_its_end(note: int, capfd: pytest.CaptureFixture[str]) -> None:
    with noted(note):
        sys.stderr.write("x" * 10 * _report._MOST_NOTED + "the end")

    kept = content(note)
    assert len(kept) <= _report._MOST_NOTED
    assert kept[-8:] == b"xthe end"


def test_the_stream_looks_as_before(note: int, capfd: pytest.CaptureFixture[str]) -> None:
    with noted(note):
        looks = sys.stderr.fileno(), sys.stderr.name, sys.stderr.mode
        same = sys.stderr is sys.__stderr__

    assert looks == (2, "<stderr>", "w")
    assert same


def test_a_note_that_the_users_code_closed_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    note = os.memfd_create("tail")
    with noted(note):
        os.close(note)
        print("still there", file=sys.stderr)

    assert capfd.readouterr().err == "still there\n"


def test_user_file_with_the_number_of_a_closed_note_is_not_written(
    capfd: pytest.CaptureFixture[str],
) -> None:
    note, users = os.memfd_create("tail"), os.memfd_create("of the user")
    with noted(note):
        os.dup2(users, note)
        print("a line", file=sys.stderr)
    size = os.fstat(users).st_size
    os.close(users)
    os.close(note)

    assert size == 0


def test_a_program_without_stderr_stays_without(note: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    _report.note_stderr(note)

    assert sys.stderr is None
