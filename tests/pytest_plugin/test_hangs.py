"""A test that hangs is told with the line of each rank, and nothing of it is left; likewise what an interrupt ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pytest_plugin.conftest import Run
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

LIMIT = 60.0
"""Seconds after which something counts as never."""
IMPORTS = """
import ctypes, os, re, signal, subprocess, sys, threading, time
import pytest, torch, torch.distributed as dist
"""
HANGS = f"""{IMPORTS}
def sleep(rank):
    time.sleep(1000)  # sleep

def lock(rank):
    mutex = threading.Lock()
    mutex.acquire()
    mutex.acquire()  # lock

def mismatch(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # mismatch, rank 0
    dist.broadcast(torch.ones(1), 0)  # mismatch, rank 1

def missing(rank):
    if rank == 0:
        dist.barrier()  # missing

def interpreter_lock(rank):
    if rank == 1:
        ctypes.PyDLL(None).pause()  # interpreter_lock, rank 1
    dist.barrier()  # interpreter_lock, rank 0

def expression(rank):
    re.match(r"(a+)+$", "a" * 60 + "b")  # expression

def typed(rank):
    sys.stdin = os.fdopen(os.pipe()[0])
    input()  # typed

def process(rank):
    subprocess.run(["sleep", "1000"])  # process

def deadlock(rank):
    first, second, both_locked = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(one, other):
        with one:
            both_locked.wait()
            with other:
                pass  # deadlock, in the line before

    thread = threading.Thread(target=take, args=(second, first))
    thread.start()
    take(first, second)

def store(rank):
    dist.distributed_c10d._get_default_store().wait(["nobody sets it"])  # store

def import_lock(rank):
    threading.Thread(target=__import__, args=("never_ends",), daemon=True).start()
    while "never_ends" not in sys.modules:
        time.sleep(0.01)
    import never_ends  # import_lock

def stopped(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()  # stopped

@pytest.mark.elastic(timeout=1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_hangs(rank, kind):
    kind(rank)

@pytest.mark.elastic
def test_next():
    dist.all_reduce(torch.ones(1))
"""
BOTH = "ranks 0-1"
KINDS = {
    "sleep": {BOTH: "sleep"},
    "lock": {BOTH: "lock"},
    "mismatch": {"rank 0": "mismatch, rank 0", "rank 1": "mismatch, rank 1"},
    "missing": {"rank 0": "missing"},
    "interpreter_lock": {"rank 0": "interpreter_lock, rank 0", "rank 1": "interpreter_lock, rank 1"},
    "expression": {BOTH: "expression"},
    "typed": {BOTH: "typed"},
    "process": {BOTH: "process"},
    "deadlock": {BOTH: "deadlock, in the line before"},
    "store": {BOTH: "store"},
    "import_lock": {BOTH: "import_lock"},
    "stopped": {"rank 0": "stopped"},
}
"""Of each, the comments behind the lines at which ranks are blocked."""


def test_each_hang_names_the_line_of_each_rank_and_the_next_test_passes(run: Run) -> None:
    code = HANGS.replace('"kind", KINDS', f'"kind", [{", ".join(KINDS)}]')
    order = """
def pytest_collection_modifyitems(items):
    last = items.pop()
    items[:] = [each for item in items for each in (item, last)]
"""
    result = run(code, conftest=order, never_ends="import time\ntime.sleep(1000)\n")

    result.assert_outcomes(failed=len(KINDS), passed=len(KINDS))
    lines = [line.partition("  # ")[2] for line in code.splitlines()]
    parts = re.split(r"^_+ test_hangs\[(\w+)\] _+$", result.stdout.str(), flags=re.MULTILINE)
    reports = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert reports.keys() == KINDS.keys()
    for kind, places in KINDS.items():
        assert "The ranks have not ended within 1 s" in reports[kind]
        for ranks, comment in places.items():
            # pytester's file begins with the first line that is not empty.
            number = lines.index(comment) + (0 if comment.startswith("deadlock") else 1) - 1
            block = reports[kind].partition(f"\n{ranks}: ")[2]
            assert f"test_it.py:{number} in " in block, f"{kind}: {reports[kind]}"
    assert (
        "in the collective all_reduce" in reports["mismatch"] and "in the collective broadcast" in reports["mismatch"]
    )
    assert "rank 1 ended" in reports["missing"]
    assert "rank 1: (the process is stopped, by a signal or a debugger)" in reports["stopped"]
    default = "the default process group"
    sums, sent = "all_reduce of float32 [1] on rank 0", "broadcast of float32 [1] on rank 1"
    assert f"\nCollective 1 of {default} differs: {sums}, {sent}.\n" in reports["mismatch"]
    assert f"\nIn {default} rank 0 waits in collective 1, barrier.\n" in reports["missing"]
    assert not any(f"of {default}" in reports[kind] or f"In {default}" in reports[kind] for kind in ("sleep", "store"))


def test_report_names_the_collective_that_a_rank_has_not_joined(run: Run) -> None:
    """Also of a group of some ranks, and where a test before has called others."""
    result = run(
        f"""{IMPORTS}
@pytest.mark.elastic(nproc=3, group="shared")
def test_calls(rank):
    dist.all_reduce(torch.ones(1))

@pytest.mark.elastic(nproc=3, group="shared", timeout=1)
def test_hangs(rank):
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    group = dist.new_group([0, 2], group_desc="model")
    if rank == 0:
        dist.all_reduce(torch.ones(2, 3), group=group)
    time.sleep(1000)
"""
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "In the process group * (model) rank 0 waits in collective 1, all_reduce of float32 *2, 3*, "
            "which not all ranks have joined: rank 2 has called none so far."
        ]
    )


def test_fixtures_are_torn_down_after_a_hang_and_x_ends_the_session(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        f"""{IMPORTS}
@pytest.fixture
def kept(tmp_path_factory):
    yield 3
    open("torn_down", "w").close()

@pytest.mark.elastic(timeout=0.5)
def test_hangs(kept):
    time.sleep(1000)

@pytest.mark.elastic
def test_never_begins():
    pass
""",
        "-x",
    )

    result.assert_outcomes(failed=1)
    assert (pytester.path / "torn_down").exists()


class Session:
    """A pytest whose ranks hang, in a program of its own; its processes are known by a variable."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"SESSION_OF_A_TEST={uuid.uuid4().hex}"
        self._folder = folder
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "elasticlib.testing.pytest_plugin",
                "-p",
                "no:cacheprovider",
                "test_it.py",
            ],
            cwd=folder,
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def left(self) -> list[str]:
        """Processes that are there besides pytest's own."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != self.process.pid:
                try:
                    if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
                except OSError:  # it has ended
                    continue
        return found

    def hangs(self) -> bool:
        """Return whether both ranks have entered the test."""
        return (self._folder / "0").exists() and (self._folder / "1").exists()


@pytest.fixture
def session(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    pytester.makepyfile(
        test_it=f"""{IMPORTS}
@pytest.mark.elastic
def test_hangs(rank):
    subprocess.Popen(["sleep", "1000"])
    open(str(rank), "w").close()
    if rank == 0:
        dist.barrier()
    time.sleep(1000)
"""
    )
    session = Session(pytester.path)
    try:
        wait_until(session.hangs)
        yield session
    finally:
        session.process.kill()
        session.process.communicate()


def test_interrupt_shows_where_each_rank_is_and_leaves_nothing(session: Session) -> None:
    session.process.send_signal(signal.SIGINT)
    output, _ = session.process.communicate(timeout=LIMIT)

    assert session.process.returncode == pytest.ExitCode.INTERRUPTED
    assert not session.left()
    assert re.search(r"^rank 0: test_it.py:\d+ in the collective barrier$", output, re.MULTILINE), output
    assert re.search(r"^rank 1: test_it.py:\d+$", output, re.MULTILINE), output


def test_a_pytest_that_is_killed_leaves_nothing(session: Session) -> None:
    assert session.left()

    session.process.kill()
    session.process.wait()

    wait_until(lambda: not session.left())
