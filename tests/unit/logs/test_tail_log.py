"""Files copied line by line: what comes out, and that a stop ends every wait."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib.logs._tail_log import TailLog, tail_logfile

LONG = 3600.0
"""Seconds between two looks, so that a test which waits for the second one does not end."""


class Console(io.StringIO):
    """Tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def tailed(path: Path, wanted: Callable[[str], bool] | None = None) -> str:
    finished, dst = threading.Event(), io.StringIO()
    finished.set()
    tail_logfile("[t0]:", str(path), dst, finished, LONG, wanted)
    return dst.getvalue()


@pytest.mark.parametrize(
    ("written", "copied"),
    [
        (b"one\n\ntwo\n", "[t0]:one\n[t0]:\n[t0]:two\n"),
        (b"one\ntwo", "[t0]:one\n[t0]:two\n"),
        (b"a\xffb\n", "[t0]:a\ufffdb\n"),
        (b"x" * 1_000_000 + b"\nend\n", f"[t0]:{'x' * 1_000_000}\n[t0]:end\n"),
    ],
    ids=["whole lines", "no newline at the end", "no text", "longer than a block"],
)
def test_without_a_filter_all_lines_are_copied_after_the_header(tmp_path: Path, written: bytes, copied: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(written)

    assert tailed(path) == copied


def test_a_filter_sees_lines_with_their_end_and_without_header(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree")
    seen: list[str] = []

    def wanted(line: str) -> bool:
        seen.append(line)
        return line == "two\n"

    assert tailed(path, wanted) == "[t0]:two\n"
    assert seen == ["one\n", "two\n", "three\n"]


def test_missing_file_is_not_waited_for_after_the_end(tmp_path: Path) -> None:
    assert tailed(tmp_path / "never") == ""


def test_a_stop_ends_the_wait_for_a_file_at_once(tmp_path: Path) -> None:
    console = Console()
    tail = TailLog("t", {0: str(tmp_path / "never")}, console, interval_sec=LONG).start()

    tail.stop()

    assert tail.stopped()
    assert console.getvalue() == ""


def test_lines_are_copied_while_it_runs_and_the_rest_at_the_stop(tmp_path: Path) -> None:
    path, console = tmp_path / "log", Console()
    path.write_text("early\n")
    tail = TailLog("t", {3: str(path)}, console, interval_sec=LONG).start()
    assert console.written.wait(10)
    early = console.getvalue()

    with path.open("a") as file:
        file.write("late\nopen")
    tail.stop()

    assert early == "[t3]:early\n"
    assert console.getvalue() == "[t3]:early\n[t3]:late\n[t3]:open\n"


def test_file_created_late_is_found(tmp_path: Path) -> None:
    path, console = tmp_path / "log", Console()
    tail = TailLog("t", {0: str(path)}, console, interval_sec=0.001).start()

    path.write_text("one\n")

    assert console.written.wait(10)
    tail.stop()
    assert console.getvalue() == "[t0]:one\n"


@pytest.mark.parametrize("open_line", ["", "half of the sec"])
def test_a_file_that_was_cut_is_followed_from_its_new_start(tmp_path: Path, open_line: str) -> None:
    path, console = tmp_path / "log", Console()
    path.write_text(f"a long first line\n{open_line}")
    tail = TailLog("t", {0: str(path)}, console, interval_sec=LONG).start()
    assert console.written.wait(10)

    path.write_text("anew\n")
    tail.stop()

    assert console.getvalue() == "[t0]:a long first line\n[t0]:anew\n"


def test_prefixes_replace_the_headers_that_they_name(tmp_path: Path) -> None:
    paths = {rank: tmp_path / str(rank) for rank in (0, 1)}
    for path in paths.values():
        path.write_text("x\n")
    console = io.StringIO()

    TailLog("t", {rank: str(path) for rank, path in paths.items()}, console, {1: "<one>"}).start().stop()

    assert sorted(console.getvalue().splitlines()) == ["<one>x", "[t0]:x"]


def test_a_file_that_cannot_be_read_does_not_end_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, console = tmp_path / "log", io.StringIO()
    path.write_text("x\n")

    TailLog("t", {0: str(tmp_path), 1: str(path)}, console).start().stop()

    assert console.getvalue() == "[t1]:x\n"
    assert "the lines of t0 are no longer copied" in caplog.text


@pytest.mark.parametrize("started", [True, False])
def test_a_tail_of_nothing_can_be_started_and_stopped(started: bool) -> None:
    tail = TailLog("t", {}, io.StringIO())
    if started:
        assert tail.start() is tail

    assert not tail.stopped()
    tail.stop()
    assert tail.stopped()
