"""
Promise 9: handlers in a program. Many of them, each a node of one job, form rounds in one process.

They do so on a machine (a network namespace) whose name server says no at once: each connection of a store asks for
its peer's name.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import ROOT, BenchmarkError
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import Dns, machines, missing

COUNT = 64
LATER = 3
LIMIT = 180.0
"""Seconds after which the program counts as hung."""


@frozen
class Formed:
    """Seconds."""

    first: float
    """From the program's start to the last node that has its rank."""
    later: float
    """From the first node that asks to the last that has its rank: the median of several rounds."""


def measure(launcher: Launcher, turn: Turn) -> Formed:
    """Run the program once. Raises `BenchmarkError` when it fails."""
    if why := missing():
        raise BenchmarkError(why)
    module = "tests.benchmarks.jobs.handlers"
    command = [launcher.python, "-m", module, launcher.package, str(COUNT), str(LATER)]
    with machines(1, Dns.NONE) as (host,):
        try:
            done = subprocess.run(
                host.entered(*command),
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{COUNT} handlers did not form {LATER + 1} rounds in {LIMIT:g} s") from error
    if done.returncode:
        raise BenchmarkError(f"{COUNT} handlers failed: {done.stderr[-500:]}")
    first, *later = json.loads(done.stdout.splitlines()[-1])
    return Formed(first, statistics.median(later))


HANDLERS = Benchmark(
    "handlers",
    measure,
    (
        Figure(9, f"program's start to the first round of its {COUNT} handlers", "s", "first", (Goal(1.0, Of.RATIO),)),
        Figure(9, f"next round of {COUNT} handlers in a program", "s", "later", (Goal(0.2, Of.RATIO),)),
    ),
)
