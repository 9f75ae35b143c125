"""Promise 8: the lines of several workers on one console: whole, quick, and soon."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import time

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import LIMIT, BenchmarkError, launched, started
from tests.benchmarks.launchers import Launcher
from tests.benchmarks.lines import Count, count

WORKERS = 4
LINES = 200_000
BEATS = 60
TEE = ("--tee", "3")


@frozen
class Flood:
    """Result of many lines written as fast as the workers can."""

    count: Count
    seconds: float
    """From the first worker's first line to the launcher's end, so that all that it prints is printed."""
    whole: float
    """Seconds of the whole command."""


@frozen
class Behind:
    """Milliseconds from the worker's write of a line until the launcher's stdout has the line."""

    median: float
    late: float
    """95% of the lines come sooner."""


@frozen
class Logs:
    """One flood and one trickle."""

    written: int
    torn: int
    lost: int
    seconds: float
    whole: float
    behind: float
    behind_late: float


def flood(launcher: Launcher, workers: int = WORKERS, lines: int = LINES) -> Flood:
    """Let each worker write *lines* lines. Raises `BenchmarkError` when the job fails."""
    with started(launched(launcher, "lines.py", str(lines), workers=workers, options=TEE)) as job:
        ended = job.succeeded(limit=LIMIT * 5)
        first = min(job.when("first", workers).values())
        with open(job.folder / "stdout", "rb") as console:
            found = count(console, workers, lines)
        return Flood(found, ended - first, ended - job.started)


def trickle(launcher: Launcher, workers: int = WORKERS, beats: int = BEATS) -> Behind:
    """
    Let each worker write the time each 50 ms and read the console as a terminal would.

    Raises `BenchmarkError` when the job fails or lines are missing.
    """
    command = launched(launcher, "beats.py", str(beats), workers=workers, options=TEE)
    delays: list[float] = []
    with started(command, stdout=subprocess.PIPE) as job:
        assert job.process.stdout is not None
        console = job.process.stdout.fileno()
        poll = select.poll()
        poll.register(console, select.POLLIN)
        begun = b""
        while poll.poll(LIMIT * 1000):
            data = os.read(console, 1 << 16)
            now = time.monotonic()
            if not data:
                break
            *whole, begun = (begun + data).split(b"\n")
            delays.extend(now - float(line.split()[-1]) for line in whole if b"]:beat " in line)
        job.succeeded()
        if len(delays) != workers * beats:
            raise BenchmarkError(f"{workers * beats} lines were written, {len(delays)} came:\n{job.complaints()}")
    return Behind(statistics.median(delays) * 1000, statistics.quantiles(delays, n=20)[-1] * 1000)


def measure(launcher: Launcher, turn: Turn) -> Logs:
    """Run one flood and one trickle."""
    lines = LINES // 10 if turn.quick else LINES
    many = flood(launcher, lines=lines)
    few = trickle(launcher)
    return Logs(WORKERS * lines, many.count.torn, many.count.lost, many.seconds, many.whole, few.median, few.late)


LOGS = Benchmark(
    "logs",
    measure,
    (
        Figure(8, "console lines torn, 4 workers, each line in two parts, `--tee 3`", "", "torn", (Goal(0),), fold=sum),
        Figure(8, "lines written", "", "written", fold=sum),
        Figure(8, "console lines lost", "", "lost", (Goal(0),), fold=sum),
        Figure(8, "first line to launcher gone", "s", "seconds", (Goal(1.0, Of.RATIO),)),
        Figure(8, "the whole command", "s", "whole"),
        Figure(8, "a line's way to the console, median", "ms", "behind", (Goal(5.0),)),
        Figure(8, "a line's way to the console, 95%", "ms", "behind_late"),
    ),
)
