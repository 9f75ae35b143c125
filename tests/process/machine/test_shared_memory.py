"""Named shared memory of a killed worker does not stay on the machine: what removes it outlives the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from elasticlib import LaunchConfig, elastic_launch
from elasticlib.errors import ChildFailedError
from tests.process import duties
from tests.process.launches import environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "shares_memory.py"
LIMIT = 60.0


@contextlib.contextmanager
def begin(how: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A job whose workers share memory, and end as *how* says; killed at the end of the block."""
    command = [sys.executable, "-m", "elasticlib.run", "--shutdown-timeout", "1", *options, str(SCRIPT), how]
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen([*command, str(folder)], env=environment(), text=True, **quiet) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def noted(folder: Path, count: int) -> list[str]:
    """Return the names that *count* workers have noted."""
    wait_until(lambda: len(list(folder.glob("*.names"))) == count, LIMIT)
    return [name for each in folder.glob("*.names") for name in each.read_text().splitlines()]


def left(names: list[str]) -> set[str]:
    return set(names) & set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("how", "options", "workers"),
    [
        ("killed", ["--max-restarts", "1"], 2),
        ("peer fails", ["--nproc-per-node", "2", "--start-method", "spawn"], 2),
    ],
    ids=["killed, with a restart", "ended with its peer"],
)
def test_shared_memory_is_removed_after_the_end(how: str, options: list[str], workers: int, tmp_path: Path) -> None:
    with begin(how, tmp_path, *options) as launcher:
        assert launcher.wait(LIMIT)

    names = noted(tmp_path, workers)
    assert len(names) >= 2 * workers
    wait_until(lambda: not left(names), LIMIT)  # torch's manager begins after two seconds


def test_killed_launcher_leaves_no_shared_memory(tmp_path: Path) -> None:
    with begin("waits", tmp_path):
        names = noted(tmp_path, 1)
        assert left(names) == set(names)

    wait_until(lambda: not left(names), LIMIT)


def test_detached_process_keeps_the_shared_memory_until_its_end(tmp_path: Path) -> None:
    with begin("detaches", tmp_path) as launcher:
        assert launcher.wait(LIMIT) == 0
    name, pid = noted(tmp_path, 1)

    try:
        assert duties.lives(int(pid))
        assert left([name])
    finally:
        (tmp_path / "end").touch()
    wait_until(lambda: not left([name]), LIMIT)


def die_with(name: str) -> None:
    """Use the caller's memory, and be killed."""
    shared_memory.SharedMemory(name)
    os.kill(os.getpid(), signal.SIGKILL)


def test_callers_resource_tracker_outlives_its_forked_workers() -> None:
    """Check that memory that forked workers share with the caller remains until the caller removes it."""
    memory = shared_memory.SharedMemory(create=True, size=1000)
    try:
        tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
        with pytest.raises(ChildFailedError):
            elastic_launch(LaunchConfig(nproc_per_node=1, start_method="fork"), die_with)(memory.name)

        assert duties.lives(tracker)
        assert left([memory.name.lstrip("/")])
    finally:
        memory.close()
        memory.unlink()
