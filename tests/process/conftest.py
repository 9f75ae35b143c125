"""Real processes: what each test of this folder must leave as it was."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib.processes import _reaper

HERE = Path(__file__).parent


def command_line(pid: int) -> str:
    """The command of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def left_behind(before: frozenset[int] = frozenset()) -> list[str]:
    """
    Descendants of this process besides reapers, the fork servers that they keep warm, and Python's own helper.

    Those of *before* are there for all tests: the ranks of tests that run on ranks.
    """
    members = _reaper.descendants(os.getpid())
    # One for the program, from the first use of multiprocessing's queues on; it goes with the program.
    members = [each for each in members if "multiprocessing.resource_tracker" not in command_line(each[0])]
    reapers = {pid for pid, parent, _ in members if parent == os.getpid() and "_reaper.py" in command_line(pid)}
    return [
        f"{pid} {command_line(pid)[:100]}"
        for pid, parent, state in members
        if pid not in {*before, *reapers} and parent not in reapers and state not in "ZX"
    ]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a process, or a change of the environment or the folder, behind."""
    environment, folder = dict(os.environ), os.getcwd()
    before = frozenset(pid for pid, _, _ in _reaper.descendants(os.getpid()))
    yield
    now = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    deadline = time.monotonic() + 5
    while (left := left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []
    assert (now, os.getcwd()) == (environment, folder)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the module ``preloaded`` where the fork server finds it; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        (tmp_path / "preloaded.py").write_text(code)
        return "preloaded"

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]).returncode:
        pytest.skip("only root may mount a file system, where the machine lets it")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)
