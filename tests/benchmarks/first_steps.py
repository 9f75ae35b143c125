"""
Promise 14: how soon a training makes its first step, and how soon it does so again after a death.

Three trainings of four workers: DDP with AdamW, Lightning, Transformers; the first one again on a GPU, where there is
one. A start is made twice, since the second may find more in the machine's caches; in a third job a worker is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import time

from attrs import frozen

from elasticlib.agent._gpu_memory import DRIVER
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import BenchmarkError, Job, launched, started
from tests.benchmarks.launchers import Launcher

WORKERS = 4


@frozen
class FirstSteps:
    """Seconds from a command, or a death, to the last worker's first optimizer step."""

    first_start: float
    second_start: float
    restart: float | None
    """None where the job did not recover."""
    not_recovered: int


def measure(launcher: Launcher, turn: Turn, kind: str) -> FirstSteps:
    """Start the training of that *kind* twice. Raises `BenchmarkError` when it never makes a step."""
    command = launched(launcher, "first_steps.py", kind, workers=WORKERS, options=["--max-restarts=1"])
    starts = list[float]()
    for _ in range(2):
        with started(command) as job:
            starts.append(max(job.when("step", WORKERS).values()) - job.started)
    with started(command) as job:
        job.when("step", WORKERS)
        restart = _restart(job)
    return FirstSteps(starts[0], starts[1], restart, restart is None)


def _restart(job: Job) -> float | None:
    pid = int((job.folder / f"pid0-{1}").read_text())
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        return max(job.when("step", WORKERS, attempt=1).values()) - killed
    except BenchmarkError:
        return None


def _of(kind: str, name: str, restart: tuple[Goal, ...]) -> Benchmark:
    started_by = (Figure(14, f"{name}: command to first step, first run", "s", "first_start", (Goal(0.7, Of.RATIO),)),)
    return Benchmark(
        f"first steps, {name}",
        functools.partial(measure, kind=kind),
        (
            *started_by,
            Figure(14, f"{name}: the same, second run", "s", "second_start", (Goal(0.45, Of.RATIO),)),
            Figure(14, f"{name}: death to first step", "s", "restart", restart),
            Figure(14, f"{name}: jobs not recovered", "", "not_recovered", (Goal(0),), fold=sum),
        ),
    )


FIRST_STEPS = (
    _of("ddp", "DDP and AdamW", (Goal(0.3), Goal(0.05, Of.RATIO))),
    _of("lightning", "Lightning", ()),
    _of("transformers", "Transformers", ()),
    *((_of("cuda", "DDP and AdamW on a GPU", ()),) if os.path.exists(DRIVER) else ()),
)
