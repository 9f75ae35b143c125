"""Lines of files that grow: each once it is whole, of one file after the other, until there will be no more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.logs import _follow
from elasticlib.logs._follow import Follower


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[str] = []
        self.over = False
        self.follower = Follower(lambda: self.paths, lambda: self.over)

    def add(self, text: str = "") -> Path:
        path = self.folder / f"{len(self.paths)}.log"
        path.write_text(text)
        self.paths.append(str(path))
        self.follower.wake()
        return path

    def end(self) -> None:
        self.over = True
        self.follower.wake()


@pytest.fixture(params=["notice", "no notice", "no watch"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    if request.param == "no notice":
        monkeypatch.setattr(_follow.Inotify, "open", lambda: None)
    if request.param == "no watch":
        monkeypatch.setattr(_follow.Inotify, "add", lambda *_: None)
    return Files(tmp_path)


def test_existing_files_are_read_to_their_end(files: Files) -> None:
    files.add("one\ntwo\nrest")
    files.end()

    assert ["one", "two", "rest"] == list(files.follower.lines())


def test_follower_returns_a_line_only_when_whole(files: Files) -> None:
    path = files.add("one\nhalf ")
    lines = files.follower.lines()
    assert "one" == next(lines)

    def write() -> None:
        with path.open("a") as file:
            file.write("of it\n")

    writer = threading.Timer(0.02, write)
    writer.start()
    assert "half of it" == next(lines)
    writer.join()


def test_follower_continues_with_the_next_file_when_created(files: Files) -> None:
    files.add("one\n")
    lines = files.follower.lines()
    assert "one" == next(lines)

    def go_on() -> None:
        files.add("two\n")
        files.end()

    writer = threading.Timer(0.02, go_on)
    writer.start()
    assert ["two"] == list(lines)
    writer.join()


def test_before_there_is_a_file_it_waits_for_one(files: Files) -> None:
    def begin() -> None:
        files.add("one\n")
        files.end()

    writer = threading.Timer(0.02, begin)
    writer.start()
    assert ["one"] == list(files.follower.lines())
    writer.join()


def test_a_file_that_is_added_just_before_the_end_is_read(tmp_path: Path) -> None:
    last = tmp_path / "last.log"
    last.write_text("last line\n")
    files: list[str] = []

    def ends_with_another_file() -> bool:
        files[:] = [str(last)]
        return True

    assert ["last line"] == list(Follower(lambda: [*files], ends_with_another_file).lines())


def test_no_file_at_all_has_no_lines(files: Files) -> None:
    files.end()

    assert [] == list(files.follower.lines())


def test_a_file_that_was_taken_away_is_passed_over(files: Files) -> None:
    files.add("one\n").unlink()
    files.add("two\n")
    files.end()

    assert ["two"] == list(files.follower.lines())


def test_invalid_utf8_is_shown_with_replacement_characters(files: Files) -> None:
    files.add().write_bytes(b"caf\xe9\n")
    files.end()

    assert ["caf\N{REPLACEMENT CHARACTER}"] == list(files.follower.lines())


def test_follower_leaves_no_file_open_when_its_reader_stops(files: Files) -> None:
    def descriptors() -> Iterator[Path]:
        return Path("/proc/self/fd").iterdir()

    files.add("one\ntwo\n")
    gc.collect()  # what other tests have left
    before = len(list(descriptors()))
    lines = files.follower.lines()
    next(lines)
    del lines

    assert before == len(list(descriptors()))
