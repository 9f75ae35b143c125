"""Files of output that become too long: the oldest goes, and nothing else moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticlib.logs import _follow
from elasticlib.logs._follow import Follower, last_line, shorten_file, skip_hole, text_of

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follow, "MOST", 4 * MIB)
    monkeypatch.setattr(_follow, "KEPT", 2 * MIB)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


def lines(first: int, count: int) -> str:
    return "".join(f"{number:07} {'x' * 1015}\n" for number in range(first, first + count))


def on_disk(file: Path) -> int:
    return os.stat(file).st_blocks * 512


def test_a_short_file_stays_as_it_is(file: Path) -> None:
    file.write_text(lines(0, 3000))
    shorten_file(str(file))

    assert text_of(str(file)) == lines(0, 3000)


def test_of_a_long_one_the_newest_stays_at_its_place(file: Path) -> None:
    file.write_text(lines(0, 8192))
    shorten_file(str(file))

    assert os.path.getsize(file) == 8 * MIB
    assert 2 * MIB <= on_disk(file) <= 4 * MIB
    assert text_of(str(file)) == (
        "[... 6 MB of older output were dropped: only the newest output of a worker is kept]\n" + lines(6145, 2047)
    )
    assert last_line([str(file)]) == f"0008191 {'x' * 1015}"


def test_writer_that_appends_is_not_affected_by_shortening(file: Path) -> None:
    with open(file, "a", encoding="utf-8") as output:
        for round_ in range(20):
            output.write(lines(round_ * 1024, 1024))
            output.flush()
            shorten_file(str(file))
            assert on_disk(file) <= 5 * MIB

    assert text_of(str(file)).endswith(lines(19 * 1024, 1024))


def test_reader_that_is_behind_continues_with_the_remaining_lines(file: Path) -> None:
    file.write_text(lines(0, 8192))
    followed = Follower(lambda: [str(file)], lambda: True).lines()
    first = next(followed)
    shorten_file(str(file))
    *middle, last = followed

    assert first == f"0000000 {'x' * 1015}"
    assert sum(line.startswith("[... ") for line in middle) == 1
    assert all(line[8:] == "x" * 1015 for line in middle if not line.startswith("[... "))
    assert last == f"0008191 {'x' * 1015}"


def test_missing_or_empty_file_raises_no_error(file: Path) -> None:
    shorten_file(str(file))
    file.touch()
    shorten_file(str(file))

    with open(file, "rb") as empty:
        assert skip_hole(empty.fileno()) == 0


def test_file_is_kept_if_the_file_system_cannot_make_holes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follow, "_fallocate", lambda: lambda *_: -1)
    file.write_text(lines(0, 8192))
    shorten_file(str(file))

    assert text_of(str(file)) == lines(0, 8192)
