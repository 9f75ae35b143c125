"""
The pytest plugin under measurement: what a test on ranks costs, beside torch's own classes, and what many leave.

``python -m tests.benchmarks.plugin [--tests 100] [--row 1000] [--turns 2] [--only hundred,start,row,interrupt]``. All
kinds of test take turns, so that they see the same machine; the first test of each session warms it up, and is said
apart. Torch's classes need ``pip install expecttest``, and are left out without it; of the one that starts processes
for each test there are few.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "ELASTICLIB_PLUGIN_CAMPAIGN"
_NO_FILES = "PYTHONDONTWRITEBYTECODE"
"""With it pytest would compile its plugins at each start, which users' machines do once."""
LIMIT = 1200.0
"""Seconds that a session may take."""
BODY = "value = torch.ones(4)\n    dist.all_reduce(value)\n    assert value[0] == 2"
OURS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.elastic({options})
@pytest.mark.parametrize("number", range({tests} + 1))
def test_it(number, rank):
    {body}
"""
DDP = """from torch.nn.parallel import DistributedDataParallel as DDP
    model = DDP(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).sum().backward()
        optimizer.step()"""
TORCHS = """
import torch, torch.distributed as dist
from torch.testing._internal import common_distributed

class TestIt(common_distributed.{base}):
    world_size = 2

    {setup}

for number in range({tests} + 1):
    def body(self):
        {begin}
        value = torch.ones(4)
        dist.all_reduce(value)
        assert value[0] == 2
        {end}
    body.__name__ = f"test_{{number:04d}}"
    setattr(TestIt, body.__name__, body)
"""
OF_EACH = """def setUp(self):
        super().setUp()
        self._spawn_processes()"""
CONTINUOUS = """@classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu\""""
NOTED = """
import json, os, threading, time
import pytest

NOTES = {"first": 0.0, "tests": [], "calls": [], "failed": 0, "process": []}

def _process():
    pages = int(open("/proc/self/statm").read().split()[1])
    return [pages * os.sysconf("SC_PAGE_SIZE") // 1024, len(os.listdir("/proc/self/fd")), threading.active_count()]

def pytest_collection_finish():
    NOTES["collected"] = time.perf_counter()

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    begin = time.perf_counter()
    try:
        return (yield)
    finally:
        NOTES["tests"].append(time.perf_counter() - begin)
        NOTES["first"] = NOTES["first"] or time.perf_counter() - NOTES["collected"]
        NOTES["process"].append(_process())

def pytest_runtest_logreport(report):
    if report.when == "call":
        NOTES["calls"].append(report.duration)
        NOTES["failed"] += report.failed

def pytest_sessionfinish():
    with open("notes.json", "w") as file:
        json.dump(NOTES, file)
"""
ROW = """
import os, threading, time
import pytest, torch, torch.distributed as dist

@pytest.mark.elastic(timeout=0.3)
@pytest.mark.parametrize("number", range({tests} + 1))
def test_it(number, rank):
    if number % 20 == 9:
        assert rank == 2
    if number % 20 == 19 and rank == 0:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""
NO_PLUGIN = "keyword"
"""A module without hooks: for each -p, pytest reads through all installed distributions, which is none of ours."""
HANGS = """
import os, time
import pytest, torch.distributed as dist

@pytest.mark.elastic
def test_hangs(rank):
    open(str(rank), "w").close()
    dist.barrier() if rank else time.sleep(1000)
"""


class Session:
    """One run of pytest over a file with this code."""

    def __init__(self, code: str, *args: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eb-")
        self.path = Path(self._folder.name)
        (self.path / "test_it.py").write_text(code)
        (self.path / "conftest.py").write_text(NOTED)
        self._mark = uuid.uuid4().hex
        variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), MARK: self._mark}
        with open(self.path / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args, "test_it.py"],
                cwd=self.path,
                env={name: value for name, value in os.environ.items() if name != _NO_FILES} | variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def notes(self) -> dict[str, Any]:
        """Wait for the end of the run; return its notes."""
        self.process.wait(LIMIT)
        try:
            return dict(json.loads((self.path / "notes.json").read_text()))
        except OSError:
            raise SystemExit((self.path / "output").read_text()[-4000:]) from None

    def left(self) -> list[str]:
        """Processes of it that are there."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                        found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
                except OSError:
                    continue
        return found


PLUGIN = "elasticlib.testing.pytest_plugin"


SLOW = "MultiProcessTestCase"
SLOW_TESTS = 3


def _kinds(tests: int) -> dict[str, Callable[[], Session]]:
    def ours(options: str, body: str = BODY, *args: str) -> Callable[[], Session]:
        return lambda: Session(OURS.format(options=options, tests=tests, body=body), "-p", PLUGIN, *args)

    kinds = {
        "a group of its own": ours("nproc=2"),
        "the same without checks": ours("nproc=2", BODY, "-o", "elastic_checks=false"),
        "group='shared'": ours("nproc=2, group='shared'"),
        "DDP, three steps": ours("nproc=2", DDP),
    }
    if importlib.util.find_spec("expecttest") is None:
        print("expecttest is not installed: torch's own classes are left out", file=sys.stderr)
        return kinds

    def torchs(base: str, setup: str, begin: str, end: str) -> Callable[[], Session]:
        number = SLOW_TESTS if base == SLOW else tests
        return lambda: Session(TORCHS.format(base=base, setup=setup, begin=begin, end=end, tests=number))

    kinds["MultiProcContinuousTest"] = torchs("MultiProcContinuousTest", CONTINUOUS, "pass", "pass")
    begin = (
        "store = dist.FileStore(self.file_name, 2); "
        "dist.init_process_group('gloo', store=store, rank=self.rank, world_size=2)"
    )
    kinds[SLOW] = torchs(SLOW, OF_EACH, begin, "dist.destroy_process_group()")
    return kinds


def hundred(tests: int, turns: int) -> None:
    """Tests that only sum a number, of each kind."""
    kinds = _kinds(tests)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for turn in range(turns):
        for name, start in kinds.items():
            print(f"turn {turn + 1} of {turns}: {name}", file=sys.stderr, flush=True)
            notes = start().notes()
            if notes["failed"] or len(notes["tests"]) != (SLOW_TESTS if name == SLOW else tests) + 1:
                raise SystemExit(f"{name}: {notes['failed']} of {len(notes['tests'])} tests failed")
            each = statistics.mean(notes["tests"][1:])
            found[name].append((notes["first"], each * tests, statistics.median(notes["calls"][1:])))
    print(f"\nOf {SLOW} there were {SLOW_TESTS}: its time is that of so many, scaled.\n")
    print(f"| {tests} tests of two ranks, gloo | first, with warm-up, s | the others, s | a test's call, median, ms |")
    print("|---|---|---|---|")
    for name, values in found.items():
        first, others, call = (statistics.median(each[index] for each in values) for index in range(3))
        print(f"| {name} | {first:.2f} | {others:.2f} | {call * 1000:.1f} |")


def start_of_pytest(turns: int) -> None:
    """Pytest over one plain test, with the plugin and without."""
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for turn in range(turns):
        for name in sorted(found, reverse=turn % 2 == 1):
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            Session("def test_it():\n    pass\n", "-p", PLUGIN if name == "with" else NO_PLUGIN).notes()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[name].append((time.perf_counter() - begin, used))
    print("\n| pytest over one plain test | wall, s | CPU, s |\n|---|---|---|")
    for name, values in found.items():
        wall, used = (statistics.median(each[index] for each in values) for index in range(2))
        print(f"| {name} the plugin | {wall:.3f} | {used:.3f} |")
    # A neighbour on the machine only ever adds to what a process takes: the quick ones tell.
    quick, plain = (statistics.quantiles([each[1] for each in values], n=4)[0] for values in found.values())
    print(f"\nThe plugin takes {(quick - plain) * 1000:.1f} ms of CPU (first quartiles of {turns} starts of each).")


def row(tests: int) -> None:
    """Many tests one after the other, of which one in ten fails or hangs."""
    session = Session(ROW.format(tests=tests), "-p", PLUGIN)
    notes = session.notes()
    hung = [each for number, each in enumerate(notes["calls"]) if number % 20 == 19]
    tenth, last = notes["process"][tests // 10], notes["process"][tests]
    print(f"\n{tests} tests, {notes['failed']} of which failed, in {sum(notes['tests']):.0f} s.")
    print(f"Those that hang took {max(hung) - 0.3:.2f} s above their limit at most.")
    print(f"Of pytest's process, after a tenth of them and at the end: memory {tenth[0]} and {last[0]} KiB, ", end="")
    print(f"descriptors {tenth[1]} and {last[1]}, threads {tenth[2]} and {last[2]}.")
    print(f"Processes left: {session.left() or 'none'}.")


def interrupt(turns: int) -> None:
    """Ctrl-C during a test that hangs, as a terminal sends it, and SIGKILL."""
    for name, number in (("SIGINT", signal.SIGINT), ("SIGKILL", signal.SIGKILL)):
        ends = []
        for _ in range(turns):
            session = Session(HANGS, "-p", PLUGIN)
            until = time.monotonic() + LIMIT
            while not all((session.path / str(rank)).exists() for rank in range(2)) and time.monotonic() < until:
                time.sleep(0.01)
            begin = time.monotonic()
            os.kill(session.process.pid, number) if number == signal.SIGKILL else os.killpg(session.process.pid, number)
            session.process.wait(LIMIT)
            while session.left() and time.monotonic() < until:
                time.sleep(0.01)
            ends.append(time.monotonic() - begin)
        print(f"\n{name} in a test that hangs: {max(ends):.2f} s at most until nothing was left, {turns} times.")


def main() -> None:
    """The campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plugin", description=__doc__)
    parser.add_argument("--tests", type=int, default=100, help="of each kind (100)")
    parser.add_argument("--row", type=int, default=1000, help="tests one after the other (1000)")
    parser.add_argument("--turns", type=int, default=2, help="of all kinds (2)")
    parser.add_argument("--only", default="hundred,start,row,interrupt", help="parts, by comma")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that on
    parts: dict[str, Callable[[], None]] = {
        "hundred": lambda: hundred(options.tests, options.turns),
        "start": lambda: start_of_pytest(20 * options.turns),
        "row": lambda: row(options.row),
        "interrupt": lambda: interrupt(options.turns),
    }
    for name in options.only.split(","):
        parts[name]()


if __name__ == "__main__":
    main()
