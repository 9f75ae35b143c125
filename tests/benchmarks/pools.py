"""Promise 17: calls of workers that stay."""

from __future__ import annotations

import json

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import started
from tests.benchmarks.launchers import Launcher

WORKERS = 4
CALLS = 10_000


@frozen
class Pools:
    """Milliseconds of a call of `WORKERS` workers, and what many of them leave in the calling program."""

    plain: float
    """A function that does nothing."""
    reduced: float
    """One that sums a number over all ranks."""
    reduction: float
    """The difference."""
    memory: float
    """MiB that the program has more after `CALLS` calls than after a tenth of them."""
    files: int
    """Descriptors and threads, counted alike."""


def measure(launcher: Launcher, turn: Turn, workers: int = WORKERS) -> Pools:
    """Run one program. Raises `BenchmarkError` when it fails."""
    numbers = map(str, (workers, CALLS // 10 if turn.quick else CALLS))
    command = [launcher.python, "-m", "tests.benchmarks.jobs.pools", launcher.name, *numbers]
    with started(command) as job:
        job.succeeded()
        found = json.loads((job.folder / "stdout").read_text().splitlines()[-1])
    kilobytes, files, threads = found["more"]
    return Pools(found["plain"], found["reduced"], found["reduced"] - found["plain"], kilobytes / 1024, files + threads)


POOLS = Benchmark(
    "calls of a pool",
    measure,
    (
        Figure(17, "call of 4 workers that stay (torchrun's are new)", "ms", "plain", (Goal(10.0),)),
        Figure(17, "the same with an all_reduce of one number", "ms", "reduced"),
        Figure(17, "what the all_reduce costs", "ms", "reduction", (Goal(2.0),)),
        Figure(17, "memory after 10,000 calls more than after 1,000", "MiB", "memory", (Goal(1.0),)),
        Figure(17, "descriptors and threads, likewise", "", "files", (Goal(0.0),)),
    ),
)
