"""
Promises 9 and 16: handlers in one program or two. Many of them, each a node of one job, form rounds in one process.

They do so on a machine (a network namespace) whose name server says no at once: each connection of a store asks for
its peer's name.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
from contextlib import ExitStack

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import ROOT, BenchmarkError
from tests.benchmarks.launchers import Launcher
from tests.hosts._netns import Dns, machines, missing
from tests.process.launches import free_port

COUNT = 64
LATER = 3
LIMIT = 180.0
"""Seconds after which the program counts as hung."""


@frozen
class Formed:
    """Seconds."""

    first: float
    """From the programs' start to the last node that has its rank."""
    later: float
    """From the first node that asks to the last that has its rank: the median of several rounds."""


def _run(launcher: Launcher, programs: int) -> Formed:
    """Run the nodes once, spread over *programs*. Raises `BenchmarkError` when one fails."""
    if why := missing():
        raise BenchmarkError(why)
    command = [launcher.python, "-m", "tests.benchmarks.jobs.handlers", launcher.package, str(COUNT), str(LATER)]
    with machines(1, Dns.NONE) as (host,), ExitStack() as stack:
        endpoint = f"127.0.0.1:{free_port()}"
        started = [
            stack.enter_context(
                host.popen(
                    [*command, endpoint, str(part), str(programs)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
                )
            )
            for part in range(programs)
        ]
        for program in started:
            stack.callback(program.kill)
        rows = [_figures(program) for program in started]
    firsts, *laters = zip(*rows, strict=True)  # a round is formed when the last program has it
    return Formed(max(firsts), statistics.median(max(of_round) for of_round in laters))


def _figures(program: subprocess.Popen[str]) -> list[float]:
    """Return the figures of *program*, which then waits for stdin to end. Raises `BenchmarkError`."""
    assert program.stdout is not None
    if not select.select([program.stdout], [], [], LIMIT)[0]:
        raise BenchmarkError(f"{COUNT} handlers did not form {LATER + 1} rounds in {LIMIT:g} s")
    line = program.stdout.readline()
    if not line:
        raise BenchmarkError(f"{COUNT} handlers failed: status {program.wait(LIMIT)}")
    figures: list[float] = json.loads(line)
    return figures


def measure(launcher: Launcher, turn: Turn) -> Formed:
    """Run the nodes in one program."""
    return _run(launcher, programs=1)


def measure_two(launcher: Launcher, turn: Turn) -> Formed:
    """Run the nodes in two programs, of which one has no part in the store."""
    return _run(launcher, programs=2)


HANDLERS = (
    Benchmark(
        "handlers",
        measure,
        (
            Figure(
                9, f"program's start to the first round of its {COUNT} handlers", "s", "first", (Goal(1.0, Of.RATIO),)
            ),
            Figure(9, f"next round of {COUNT} handlers in a program", "s", "later", (Goal(0.2, Of.RATIO),)),
        ),
    ),
    Benchmark(
        "handlers in two programs",
        measure_two,
        (
            Figure(
                16,
                f"start of two programs to the first round of their {COUNT} handlers",
                "s",
                "first",
                (Goal(1.0, Of.RATIO),),
            ),
        ),
    ),
)
