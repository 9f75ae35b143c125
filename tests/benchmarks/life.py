"""Promises 3, 5 and 6: start, memory and end of one job of eight workers that import torch."""

from __future__ import annotations

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import launched, started
from tests.benchmarks.launchers import Launcher

WORKERS = 8


@frozen
class Life:
    """Times, memory and processes of one job."""

    start: float
    """Seconds from before the launcher's process to the last worker past its imports."""
    memory: float
    """MiB of the whole process tree (PSS), all workers waiting."""
    end: float
    """Seconds from the last worker's last line to the launcher's end."""
    processes: int


def measure(launcher: Launcher, turn: Turn, workers: int = WORKERS) -> Life:
    """Run the job once. Raises `BenchmarkError` when it does not succeed."""
    with started(launched(launcher, "life.py", workers=workers)) as job:
        up = job.when("up", workers)
        processes = tree.of_job(job.process.pid, job.folder)
        memory = tree.pss(processes)
        with job.opened():
            ended = job.succeeded()
        last = max(job.when("end", workers).values())
        return Life(max(up.values()) - job.started, memory / 2**20, ended - last, len(processes))


LIFE = Benchmark(
    "life",
    measure,
    (
        Figure(3, "start: command to last of 8 workers past `import torch`", "s", "start", (Goal(0.3, Of.RATIO),)),
        Figure(5, "end: last of 8 workers done to launcher gone", "s", "end", (Goal(0.1, Of.RATIO),)),
        Figure(6, "memory: 8 workers that imported torch, whole tree, PSS", "MiB", "memory", (Goal(0.27, Of.RATIO),)),
        Figure(6, "processes of that tree", "", "processes"),
    ),
)
