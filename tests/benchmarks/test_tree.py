"""Search for the processes of a job, and their end, in the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks import tree
from tests.benchmarks.job import BenchmarkError, environment, started
from tests.benchmarks.kills import find

pytestmark = pytest.mark.slow

_PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); {}"
_STAY = "import signal; signal.pause()"
_REAPER = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])"
_FORK_SERVER = "import os, signal; os.fork() or os.fork() or print('worker', os.getpid(), flush=True); signal.pause()"


def _wait(process: subprocess.Popen[bytes], folder: Path, count: int) -> frozenset[tree.Process]:
    deadline = time.monotonic() + 10
    while len(found := tree.of_job(process.pid, folder)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} processes"
        time.sleep(0.005)
    return found


def test_a_grandchild_in_its_own_session_is_found_after_its_parents_death(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT.format(_STAY)], env=environment(tmp_path))
    known = _wait(parent, tmp_path, 2)
    parent.kill()
    parent.wait()

    left = tree.left_after(0.2, (), tmp_path)
    tree.kill_all(known, tmp_path)

    assert {each.pid for each in known} - {parent.pid} == {each.pid for each in left}
    assert frozenset() == tree.left_after(5.0, known, tmp_path)


def test_the_mark_of_a_job_is_not_that_of_a_longer_name(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], env=environment(tmp_path / "job-10"))
    try:
        inside = tree.marked(tmp_path, tree.table())
        beside = tree.marked(tmp_path / "job-1", tree.table())
    finally:
        child.kill()
        child.wait()

    assert {child.pid} == inside
    assert set() == beside


def test_a_pid_that_belongs_to_another_process_now_is_left_alone() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        process = tree.table()[child.pid]
        tree.kill([tree.Process(process.pid, process.parent, process.session, process.born - 1)])

        assert child.poll() is None
        assert child.pid in tree.table()
    finally:
        child.kill()
        child.wait()


def test_the_memory_of_a_process_is_above_nothing() -> None:
    mine = [each for each in tree.table().values() if each.pid == os.getpid()]

    assert tree.pss(mine) > 2**20


def test_a_job_leaves_no_process_and_no_folder() -> None:
    with started([sys.executable, "-c", _PARENT.format(_STAY)]) as job:
        known = _wait(job.process, job.folder, 2)

    assert frozenset() == tree.still_there(known, job.folder)
    assert not job.folder.exists()


def test_a_launcher_that_ends_early_makes_no_figure() -> None:
    with (
        started([sys.executable, "-c", "raise SystemExit('no such option')"]) as job,
        pytest.raises(BenchmarkError, match="no such option"),
    ):
        job.when("up", 1)


def test_processes_between_launcher_and_workers_are_found_by_part_name(tmp_path: Path) -> None:
    (tmp_path / "_reaper.py").write_text(_REAPER)
    (tmp_path / "_fork_server.py").write_text(_FORK_SERVER)
    parts = [str(tmp_path / "_reaper.py"), str(tmp_path / "_fork_server.py")]
    launcher = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1].split(',')])"
    with started([sys.executable, "-c", launcher, ",".join(parts)]) as job:
        job.wait_for(lambda: len((job.folder / "stdout").read_text().split()) == 2, "the worker's process id")
        worker = int((job.folder / "stdout").read_text().split()[1])
        chain = [find(part, job.process.pid) for part in ("launcher", "reaper", "fork server", "spawner")]
        parents = {each.pid: each.parent for each in tree.table().values()}

    pids = [each.pid for each in chain if each is not None]
    assert job.process.pid == pids[0]
    assert pids == [parents[pid] for pid in [*pids[1:], worker]]
