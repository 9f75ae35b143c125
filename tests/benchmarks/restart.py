"""Promise 2: how soon eight workers that import torch are back after one of them died."""

from __future__ import annotations

from attrs import frozen

from tests.benchmarks import journal
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import launched, started
from tests.benchmarks.launchers import Launcher

WORKERS = 8


@frozen
class Restart:
    """Duration of one restart."""

    seconds: float
    """From the moment before the victim's SIGKILL to the last new worker past its imports."""


def measure(launcher: Launcher, turn: Turn, workers: int = WORKERS) -> Restart:
    """Run one job in which a worker dies once, another one each turn. Raises `BenchmarkError` when it fails."""
    victim = turn.number % workers
    command = launched(launcher, "restart.py", str(victim), workers=workers, options=["--max-restarts=1"])
    with started(command) as job:
        job.when("up", workers)
        with job.opened():
            again = job.when("up", workers, attempt=1)
        killed = journal.select(job.marks(), "killed")[victim]
        job.succeeded()
        return Restart(max(again.values()) - killed)


RESTART = Benchmark(
    "restart",
    measure,
    (
        Figure(
            2, "restart: a death to last of 8 new workers past `import torch`", "s", "seconds", (Goal(0.02, Of.RATIO),)
        ),
    ),
)
