"""Sources that announce the end of a node: the scheduler's time, a file, and a function of the user."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib.agent import EndNotice
from elasticlib.errors import ConfigError, StartError
from elasticlib.job import AnnouncedEnd, end_watch, source_of
from elasticlib.workers import Inbox, StopRequest
from tests.waiting import wait_until

NOW = 1_790_000_000.0
END = NOW + 100.0


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def no_answer() -> None:
    return None


@pytest.mark.parametrize(
    ("now", "present", "left"),
    [
        (END - 31, no_answer, None),
        (END - 30, no_answer, 30.0),
        # The owner has extended the time.
        (END - 30, lambda: END + 600, None),
        (END - 30, lambda: END - 10, 20.0),
    ],
)
def test_the_end_of_the_time_is_announced_before_it(
    now: float, present: Callable[[], float | None], left: float | None
) -> None:
    request = AnnouncedEnd(EndNotice(end_time=END), 30.0, present)(now)

    assert left == (None if request is None else request.grace)
    assert request is None or (request.is_notice and request.needs_listener)


@pytest.mark.parametrize("present", [no_answer, lambda: END - 60])
def test_a_past_end_leaves_as_much_time_as_an_end_without_a_time(present: Callable[[], float | None]) -> None:
    request = AnnouncedEnd(EndNotice(end_time=END), 30.0, present)(END + 5)

    assert request is not None and request.grace is None


def test_an_extended_time_is_announced_before_its_new_end() -> None:
    source = AnnouncedEnd(notice := EndNotice(end_time=END), 30.0, lambda: END + 600)

    assert source(END) is None and END + 600 == notice.end_time
    assert source(END + 569) is None and source(END + 570) is not None


def test_unknown_end_time_is_queried_once() -> None:
    answers = iter([END])
    source = AnnouncedEnd(notice := EndNotice(), 30.0, lambda: next(answers, None))

    assert source(NOW) is None and END == notice.end_time
    assert source(NOW + 1) is None and source(END - 20) is not None


def test_unknown_end_is_never_announced() -> None:
    source = AnnouncedEnd(EndNotice(), 30.0, no_answer)

    assert source(NOW) is None and source(NOW + 1e9) is None


def test_a_file_announces_the_end_by_its_first_line(tmp_path: Path) -> None:
    source = source_of(tmp_path / "notice")
    assert source(NOW) is None

    (tmp_path / "notice").write_text("reclaimed in 120 s\nmore")

    assert StopRequest("reclaimed in 120 s", is_notice=True) == source(NOW)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff" * 5000])
def test_a_file_may_have_any_content(tmp_path: Path, content: bytes) -> None:
    source = source_of(str(tmp_path / "notice"))
    (tmp_path / "notice").write_bytes(content)

    request = source(NOW)

    assert request is not None and 0 < len(request.why) <= 200


def test_a_file_that_exists_at_the_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notice").touch()

    with pytest.raises(ConfigError, match=r"preempt_notice='.*notice'|preempt_notice.*exists already.*remove it"):
        source_of(tmp_path / "notice")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda folder: folder / "notice" / "file", "Not a directory"),
        (lambda folder: folder / "loop" / "file", "Too many levels"),
        (lambda folder: f"{folder}/\0", "embedded null"),
    ],
)
def test_a_path_at_which_no_file_can_appear_is_refused(
    tmp_path: Path, make: Callable[[Path], Path | str], why: str
) -> None:
    (tmp_path / "notice").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    with pytest.raises(ConfigError, match=f"preempt_notice.*cannot be read.*{why}.*give the path"):
        source_of(make(tmp_path))


def test_a_relative_path_stays_the_one_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = source_of("notice")
    (tmp_path / "notice").touch()
    monkeypatch.chdir("/")

    assert source(NOW) is not None


def test_a_folder_at_the_path_is_reported_once_and_its_file_counts(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.job._end_watch._INTERVAL", 0.001)
    looks: list[float] = []
    look = source_of(path := tmp_path / "notice")

    def source(now: float) -> StopRequest | None:
        looks.append(now)
        return look(now)

    with caplog.at_level(logging.WARNING, "elasticlib"), end_watch([source], inbox):
        path.mkdir()
        wait_until(lambda: "Is a directory" in caplog.text)
        before = len(looks)
        wait_until(lambda: len(looks) > before + 2)
        path.rmdir()
        path.with_suffix(".new").write_text("reclaimed")
        path.with_suffix(".new").rename(path)
        wait_until(lambda: bool(inbox._items))

    assert 1 == len(caplog.messages)
    assert [StopRequest("reclaimed", is_notice=True)] == inbox.drain()


def test_a_function_that_failed_is_read_again(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.job._end_watch._INTERVAL", 0.001)
    failures = iter([OSError("no route to the metadata server"), SystemExit(1)])

    def function() -> str:
        for failure in failures:
            raise failure
        return "reclaimed"

    with caplog.at_level(logging.WARNING, "elasticlib"), end_watch([source_of(function)], inbox):
        wait_until(lambda: bool(inbox._items))

    assert 1 == len(caplog.messages) and "OSError: no route" in caplog.text
    assert [StopRequest("reclaimed", is_notice=True)] == inbox.drain()


def test_no_thread_is_left_if_a_later_one_cannot_start(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    start, threads = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        threads.append(thread)
        if len(threads) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)

    with pytest.raises(StartError, match="elasticlib-end"), end_watch([lambda now: None] * 3, inbox):
        pass  # not reached

    first, second = threads
    first.join(10)
    assert not first.is_alive() and not second.is_alive()


def test_a_function_announces_the_end_once(inbox: Inbox) -> None:
    answers = iter([None, "", "reclaimed"])

    with end_watch([lambda now: source_of(lambda: next(answers))(now)], inbox):
        wait_until(lambda: bool(inbox._items))

    assert [StopRequest("reclaimed", is_notice=True)] == inbox.drain()


def test_a_source_that_fails_is_reported_once(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def fails(now: float) -> StopRequest | None:
        raise OSError("no route to the metadata server")

    with caplog.at_level(logging.WARNING, "elasticlib"), end_watch([fails, lambda now: StopRequest("other")], inbox):
        wait_until(lambda: "no route" in caplog.text and bool(inbox._items))

    assert 1 == caplog.text.count("no route to the metadata server")
    assert [StopRequest("other")] == inbox.drain()
