"""Promise 4: `elastic_launch` for the second time in one program."""

from __future__ import annotations

import statistics

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import started
from tests.benchmarks.launchers import Launcher

WORKERS = 8


@frozen
class Calls:
    """Seconds from a call to the last worker's first line."""

    first: float
    later: float
    """The second call, with the library's own default start method."""
    whole: float
    """The second call again, to its return."""
    forked: float
    """The second call with start method ``fork``, which copies the calling program."""


def one_program(launcher: Launcher, start_method: str, workers: int, calls: int) -> list[tuple[float, float]]:
    """
    Make *calls* calls in one program; of each the seconds to the last worker's first line, and to its return.

    Raises `BenchmarkError` when the program fails.
    """
    module = "tests.benchmarks.jobs.calls"
    command = [launcher.python, "-m", module, launcher.name, start_method, str(workers), str(calls)]
    with started(command) as job:
        job.succeeded()
        lines = (job.folder / "stdout").read_text().splitlines()
    pairs = (line.split() for line in lines)
    return [(float(first), float(whole)) for first, whole in pairs]


def measure(launcher: Launcher, turn: Turn, workers: int = WORKERS) -> Calls:
    """Run two programs, one with the library's default start method and one with ``fork``."""
    calls = one_program(launcher, launcher.start_method, workers, calls=2)
    forked = one_program(launcher, "fork", workers, calls=4)
    return Calls(calls[0][0], calls[1][0], calls[1][1], statistics.median(first for first, _ in forked[1:]))


CALLS = Benchmark(
    "calls",
    measure,
    (
        Figure(4, "second call of 8 workers to their last first line", "s", "later", (Goal(0.02, Of.RATIO),)),
        Figure(
            4,
            "the same, against torch's unsafe `fork`",
            "s",
            "later",
            (Goal(1.0, Of.RATIO, strict=True),),
            against="forked",
        ),
        Figure(4, "second call to its return", "s", "whole"),
        Figure(4, "first call to its workers' last first line", "s", "first"),
    ),
)
