"""
Promise 14: how soon a training makes its first step, and how soon it does so again after a death.

Three trainings of four workers: DDP with AdamW, Lightning, Transformers; the first one again on a GPU, where there is
one. A start is made twice, so that the second has
what the first has shown; in the second job a worker is killed, once nothing more is being learned. Rules of this file:
what is kept of former runs is kept in a folder of this benchmark's own.
"""

from __future__ import annotations

import functools
import os
import signal
import time

from attrs import frozen

from elasticlib.agent._gpu_memory import DRIVER
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import BenchmarkError, Job, launched, new_folder, started
from tests.benchmarks.launchers import Launcher

WORKERS = 4
_SETTLED = 20.0
"""Seconds after the last that was learned, in which more of it would be."""


@frozen
class FirstSteps:
    """Seconds from a command, or a death, to the last worker's first optimizer step."""

    first_start: float
    second_start: float
    restart: float | None
    """None where the job did not recover."""
    not_recovered: int
    learning: float | None
    """From the first step of a first run to the last that was learned of it."""


def measure(launcher: Launcher, turn: Turn, kind: str) -> FirstSteps:
    """Start the training of that *kind* twice. Raises `BenchmarkError` when it never makes a step."""
    with new_folder() as cache:
        variables = {"ELASTICLIB_CACHE": str(cache), "LOGLEVEL": "INFO"}
        command = launched(launcher, "first_steps.py", kind, workers=WORKERS, options=["--max-restarts=1"])
        with started(command, variables=variables) as job:
            first_start = max(job.when("step", WORKERS).values()) - job.started
            learned = _await_learned(job, launcher.learned)
        with started(command, variables=variables) as job:
            second_start = max(job.when("step", WORKERS).values()) - job.started
        with started(command, variables=variables) as job:
            job.when("step", WORKERS)
            _await_learned(job, launcher.learned)
            restart = _restart(job)
        learning = None if learned is None else learned - first_start
        return FirstSteps(first_start, second_start, restart, restart is None, learning)


def _await_learned(job: Job, word: str) -> float | None:
    """Wait until nothing more is learned; seconds from the start to the last that was, None where nobody learns."""
    if not word:
        return None
    count, last = 0, time.monotonic()
    while time.monotonic() < last + (_SETTLED if count else 10 * _SETTLED):
        now = (job.folder / "stderr").read_text(errors="replace").count(word)
        if now != count:
            count, last = now, time.monotonic()
        time.sleep(0.02)
    return last - job.started


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
            Figure(None, f"{name}: first step to all that was learned", "s", "learning"),
        ),
    )


FIRST_STEPS = (
    _of("ddp", "DDP and AdamW", (Goal(0.3), Goal(0.05, Of.RATIO))),
    _of("lightning", "Lightning", ()),
    _of("transformers", "Transformers", (Goal(0.1, Of.RATIO),)),
    *((_of("cuda", "DDP and AdamW on a GPU", ()),) if os.path.exists(DRIVER) else ()),
)
