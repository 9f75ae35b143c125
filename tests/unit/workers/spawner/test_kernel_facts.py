"""Kernel's facts about real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib.workers.spawner import _kernel_facts

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program that runs some code, and wait until it has."""
    started: list[subprocess.Popen[str]] = []

    def new(code: str, then: str = "time.sleep(600)", **streams: int) -> subprocess.Popen[str]:
        ready, write = os.pipe()
        code = f"import os, sys, time\n{code}\nos.write({write}, b'x')\n{then}"
        started.append(subprocess.Popen([sys.executable, "-c", code], text=True, pass_fds=[write], **streams))
        os.close(write)
        assert os.read(ready, 1)
        os.close(ready)
        return started[-1]

    yield new
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("code", "own"),
    [
        ("file = open('checkpoint', 'wb')", True),
        ("file = open('data', 'r+b')", True),
        ("file = open('data', 'rb')", False),
        ("file = open('log', 'ab')", False),
        ("file = open('gone', 'wb'); os.unlink('gone')", False),
        ("memory = os.memfd_create('memory')", False),
        ("file = open('/dev/null', 'wb')", False),
        ("pass", False),
    ],
)
def test_a_file_open_for_writing_is_a_file_of_its_own(
    start: Start, code: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").touch()

    assert own == _kernel_facts.has_own_file(start(code).pid)


def test_its_streams_and_what_this_process_has_open_too_are_not_its_own(start: Start, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    apart = start("pass", stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    shared = os.open(tmp_path / "shared", os.O_WRONLY | os.O_CREAT)
    both = start(f"file = open({str(tmp_path / 'shared')!r}, 'wb')")

    assert [False, False] == [_kernel_facts.has_own_file(each.pid) for each in (apart, both)]
    os.close(shared)
    assert _kernel_facts.has_own_file(both.pid)


def test_bytes_that_a_process_writes_are_counted(start: Start, tmp_path: Path) -> None:
    idle, writes = start("pass"), start(f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes(100_000))")

    assert 100_000 <= _kernel_facts.written_bytes(writes.pid) - _kernel_facts.written_bytes(idle.pid)


def test_children_are_those_that_a_process_started(start: Start) -> None:
    process = start("import subprocess; child = subprocess.Popen(['sleep', '600'])")
    (child,) = _kernel_facts.children(process.pid)

    assert [] == _kernel_facts.children(child)
    os.kill(child, 9)


@pytest.mark.parametrize(
    ("other", "main", "runs"),
    [
        ("time.sleep(600)", "time.sleep(600)", False),
        ("time.sleep(600)", "while True: pass", True),
        ("while True: pass", "time.sleep(600)", False),
    ],
    ids=["none", "main", "other"],
)
def test_a_main_thread_that_runs_while_all_others_sleep_is_seen(
    other: str, main: str, runs: bool, start: Start
) -> None:
    thread = f"import threading\nthreading.Thread(target=exec, args=({other!r}, globals()), daemon=True).start()"
    program, deadline = start(thread, then=main), time.monotonic() + 60
    answers = deque[bool](maxlen=1000)
    # A thread runs before it sleeps, and waits for the interpreter's lock before it runs: the last answers count.
    while list(answers) != [runs] * 1000 and time.monotonic() < deadline:
        answers.append(_kernel_facts.only_main_thread_runs(program.pid))

    assert [runs] * 1000 == list(answers)


def test_ended_process_has_no_facts() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()

    assert (0, False, []) == (
        _kernel_facts.written_bytes(process.pid),
        _kernel_facts.has_own_file(process.pid),
        _kernel_facts.children(process.pid),
    )
