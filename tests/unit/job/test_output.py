"""Output of shown ranks: it uses the caller's stream, in the caller's context."""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib import ConfigError, DefaultLogsSpecs, LaunchConfig
from elasticlib.job._output import JobLogs, own_logs, warn_of_ranks
from elasticlib.notebook import CallersStream, _callers_stream, is_stdout_replaced

CELL: contextvars.ContextVar[str] = contextvars.ContextVar("cell", default="none")


class Stream(io.StringIO):
    """Remembers in which context it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []

    def write(self, text: str) -> int:
        self.cells.append(CELL.get())
        return super().write(text)


def made_for(stream: Any) -> CallersStream:
    """Made by a caller whose stdout is *stream*."""
    with contextlib.redirect_stdout(stream):
        return CallersStream()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def in_another_thread(*blocks: bytes, to: CallersStream) -> None:
    def writes() -> None:
        for block in blocks:
            to(block)

    thread = threading.Thread(target=writes)
    thread.start()
    thread.join()


def test_output_uses_the_stream_and_the_context_of_its_creator() -> None:
    stream = Stream()
    token = CELL.set("mine")
    to = made_for(stream)
    CELL.reset(token)
    in_another_thread(b"hello\n", to=to)

    assert stream.getvalue() == "hello\n"
    assert stream.cells == ["mine"]


def test_a_later_call_takes_it_along() -> None:
    stream, later = Stream(), Stream()
    to = made_for(stream)
    to(b"first\n")
    with contextlib.redirect_stdout(later):
        to.turn_here()
    to(b"second\n")

    assert (stream.getvalue(), later.getvalue()) == ("first\n", "second\n")


def test_stream_of_a_kernel_writes_to_the_cell_of_the_call() -> None:
    class Kernels(Stream):
        _parent_header: contextvars.ContextVar[str] = contextvars.ContextVar("parent")
        fallback = "the cell of the call"

        @property
        def parent_header(self) -> str:
            return self._parent_header.get(self.fallback)

        def write(self, text: str) -> int:
            self.cells.append(self.parent_header)
            return len(text)

    made: Any = Kernels()
    to = made_for(made)
    made.fallback = "a later cell"
    in_another_thread(b"x", to=to)

    assert made.cells == ["the cell of the call"]


def test_a_block_may_end_within_a_character() -> None:
    stream = Stream()
    to = made_for(stream)
    for byte in "ü€".encode() + b"\xff\n":
        to(bytes([byte]))

    assert stream.getvalue() == "ü€�\n"


def test_without_a_stream_output_is_dropped() -> None:
    made_for(None)(b"x")


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell shows ten characters of a job's output."""
    monkeypatch.setattr(_callers_stream, "_MOST_SHOWN", 10)


@pytest.mark.usefixtures("kernel", "little_room")
@pytest.mark.parametrize(
    ("blocks", "shown", "tail"),
    [
        ([b"12345678"] * 5, "12345678\n", "12345678" * 4),
        ([b"one\ntwo\nthree\n"], "one\ntwo\n", "three"),
        ([b"one\ntwo\nthree\n", b"four\n"], "one\ntwo\n", "three\nfour"),
    ],
    ids=["no newline", "whole lines", "more blocks"],
)
def test_a_cell_gets_whole_lines_and_at_the_end_the_last_ones(blocks: list[bytes], shown: str, tail: str) -> None:
    stream = Stream()
    to = made_for(stream)
    to.files = lambda: "/logs"
    for block in blocks:
        to(block)
    head = f"{shown}[... the rest is in /logs]\n"
    assert stream.getvalue() == head
    to.rest()
    to.rest()  # which has nothing to add

    assert stream.getvalue() == f"{head}[the full output is in /logs]\n{tail}\n"
    assert to.is_full


@pytest.mark.usefixtures("little_room")
def test_a_cell_has_the_last_lines_in_a_display_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str, bool]] = []

    def publish(data: Any, _: Any, *, transient: Any, update: bool) -> None:
        shown.append((transient["display_id"], data["text/plain"], update))

    class Kernels(Stream):
        parent_header = "a cell"

    displays = SimpleNamespace(parent_header="a cell", publish=publish)
    shell = SimpleNamespace(kernel=object(), display_pub=displays)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    stream = Kernels()
    to = made_for(stream)
    to.files = lambda: "/logs/0.log"
    for block in (b"one\ntwo\n", b"three\n", b"four\n"):
        to(block)
    to.rest()

    heading = "[the full output is in /logs/0.log]"
    assert stream.getvalue() == "one\ntwo\n"
    assert [(text, update) for _, text, update in shown] == [
        (f"{heading}\nthree", False),
        (f"{heading}\nthree\nfour", True),
    ]
    assert len({name for name, _, _ in shown}) == 1


@pytest.mark.usefixtures("little_room")
def test_a_program_gets_all() -> None:
    stream = Stream()
    to = made_for(stream)
    to(b"1" * 100)

    assert len(stream.getvalue()) == 100
    assert not to.is_full


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Any]]:
    made = [open(tmp_path / name, "w") for name in ("a", "b")]
    yield made
    for each in made:
        each.close()


def test_a_stream_is_replaced_where_children_write_elsewhere(monkeypatch: pytest.MonkeyPatch, files: list[Any]) -> None:
    facts = os.fstat(files[0].fileno())
    monkeypatch.setattr(os, "fstat", lambda fd, real=os.fstat: facts if fd == 1 else real(fd))

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert is_stdout_replaced()  # it has no descriptor
    for replaced, file in enumerate(files):
        monkeypatch.setattr(sys, "stdout", file)
        assert is_stdout_replaced() is bool(replaced)
    monkeypatch.setattr(sys, "stdout", None)
    assert not is_stdout_replaced()


@pytest.mark.usefixtures("kernel")
def test_a_kernels_stream_always_is() -> None:
    assert is_stdout_replaced()


@pytest.mark.parametrize(
    ("show", "shown", "prefix"),
    [(None, [0, 1, 2], "[${rank}] "), ((0,), [0], ""), ((0, 2), [0, 2], "[${rank}] "), ((9,), [], ""), ((), [], "")],
)
def test_requested_ranks_are_shown(show: Any, shown: list[int], prefix: str) -> None:
    logs = JobLogs(show)
    dest = logs.reify({rank: {"RANK": str(rank)} for rank in range(3)})

    assert sorted(dest.tee_stdouts) == shown
    assert sorted(dest.stdouts) == [0, 1, 2]
    assert dest.stdouts == dest.stderrs
    assert logs.default_prefix == prefix


def test_output_settings_of_the_caller_are_kept() -> None:
    given = DefaultLogsSpecs()

    assert own_logs(LaunchConfig(logs_specs=given), True) is given
    assert type(own_logs(LaunchConfig(), False)) is DefaultLogsSpecs
    assert isinstance(own_logs(LaunchConfig(), True), JobLogs)
    assert isinstance(own_logs(LaunchConfig(show="all"), False), JobLogs)
    with pytest.raises(ConfigError, match=r"show=\(0,\) has no effect with logs_specs"):
        own_logs(LaunchConfig(logs_specs=given, show=0), False)


@pytest.mark.parametrize(
    ("show", "workers", "message"),
    [
        ((7,), 2, "show=(7,) names rank 7, but this job has only ranks 0-1: no output is shown"),
        ((0, 2, 3), 2, "show=(0, 2, 3) names ranks 2-3, but this job has only ranks 0-1: that has no effect here"),
        ((1,), 1, "show=(1,) names rank 1, but this job has only rank 0: no output is shown"),
    ],
)
def test_ranks_to_be_shown_that_are_not_there_are_named(
    show: tuple[int, ...], workers: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_ranks(JobLogs(show), workers, LaunchConfig(show=show))

    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.parametrize(
    "config", [{"show": "all"}, {"show": (0, 1)}, {"show": ()}, {}, {"show": (7,), "max_nodes": 4}]
)
def test_ranks_that_are_there_or_may_be_on_other_nodes_are_not(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_ranks(JobLogs(), 2, LaunchConfig(**config))

    assert caplog.records == []
