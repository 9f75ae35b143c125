"""What a worker detached on purpose: processes in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import duties

SCRIPT = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open(f"{sys.argv[1]}/draft{os.environ['RANK']}", "w") as file:
    file.write(str(child.pid))
os.rename(file.name, f"{sys.argv[1]}/child{os.environ['RANK']}")
while not all(os.path.exists(f"{sys.argv[1]}/child{rank}") for rank in "01"):
    time.sleep(0.01)
if sys.argv[2] == "waits":
    time.sleep(600)
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "0" else 0)
"""


class Job:
    """A job whose two workers detach a process each, and then do what is said."""

    def __init__(self, folder: Path, then: str, *options: str) -> None:
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", *options]
        self.launcher = subprocess.Popen(
            [*command, str(folder / "script.py"), str(folder), then], stderr=subprocess.PIPE, text=True
        )
        self._files = [folder / "child0", folder / "child1"]

    def children(self) -> list[int]:
        duties.wait_for(lambda: all(file.exists() for file in self._files), 60.0)
        return [int(file.read_text()) for file in self._files]


@pytest.fixture
def end() -> Iterator[list[int]]:
    """Processes to end after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_detached_processes_outlive_a_program_that_succeeds(method: str, end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "0", "--start-method", method)
    _, stderr = job.launcher.communicate()
    end += job.children()

    assert 0 == job.launcher.returncode, stderr
    assert [True, True] == [duties.lives(pid) for pid in end]
    assert "detached" not in stderr


def test_detached_processes_die_with_a_program_that_fails_and_are_named(end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "3")
    _, stderr = job.launcher.communicate()
    end += job.children()

    assert 1 == job.launcher.returncode
    assert [False, False] == [duties.lives(pid) for pid in end]
    assert all(f"process {pid} (sleep 600)" in stderr for pid in end), stderr


def test_detached_processes_die_with_a_launcher_that_is_killed(end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "waits")
    end += job.children()
    job.launcher.kill()
    job.launcher.communicate()

    duties.wait_for(lambda: not any(map(duties.lives, end)))
