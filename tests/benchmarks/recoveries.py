"""
Promise 1: a restart works. Two gloo ranks, one kills itself in the middle of the first attempt.

The whole campaign: ``python -m tests.benchmarks.recoveries --jobs 100``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from tests.benchmarks import journal
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import launched, new_folder, started
from tests.benchmarks.launchers import LAUNCHERS, Launcher

WORKERS = 2
LIMIT = 60.0
"""Seconds after which a job counts as hung."""


@frozen
class Recovery:
    """One job."""

    finished: bool
    """Both ranks computed together after the restart, and the launcher ended with 0."""
    seconds: float
    exitcode: int | None
    """None for a job that hung."""
    complaints: str
    """The end of its stderr."""


@frozen
class Recoveries:
    """Several jobs."""

    jobs: tuple[Recovery, ...]

    @property
    def unfinished(self) -> int:
        """Jobs that failed or hung."""
        return sum(not each.finished for each in self.jobs)

    @property
    def count(self) -> int:
        """Jobs that were run."""
        return len(self.jobs)

    def __str__(self) -> str:
        hung = sum(each.exitcode is None for each in self.jobs)
        done = self.count - self.unfinished
        return f"{done} of {self.count} jobs recovered ({self.unfinished - hung} failed, {hung} hung)"


def recover(launcher: Launcher, victim: int = 1, limit: float = LIMIT, parent: Path | None = None) -> Recovery:
    """Run one job of which rank *victim* dies once; it is killed when it is not done after *limit* seconds."""
    command = launched(launcher, "recovery.py", str(victim), workers=WORKERS, options=["--max-restarts=1"])
    with started(command, parent=parent) as job:
        ended = job.wait_for_end(limit)
        code = job.process.returncode
        done = journal.select(job.marks(), "finished", in_attempt=1)
        finished = code == 0 and len(done) == WORKERS
        seconds = limit if ended is None else ended - job.started
        return Recovery(finished, seconds, code, "" if finished else job.complaints())


def campaign(
    launcher: Launcher,
    jobs: int,
    seed: int,
    limit: float = LIMIT,
    report: Callable[[str], object] | None = None,
) -> Recoveries:
    """Run *jobs* jobs one after the other, each with a victim drawn from *seed*; *report* hears of each."""
    draw = random.Random(seed)
    done: list[Recovery] = []
    with new_folder() as folder:
        for number in range(jobs):
            each = recover(launcher, draw.randrange(WORKERS), limit, folder)
            done.append(each)
            if report is not None:
                end = "recovered" if each.finished else "hung" if each.exitcode is None else f"exit {each.exitcode}"
                report(f"{launcher.name} job {number + 1}/{jobs}: {end} after {each.seconds:.1f} s")
    return Recoveries(tuple(done))


def measure(launcher: Launcher, turn: Turn) -> Recoveries:
    """A few jobs, other victims each turn."""
    return campaign(launcher, jobs=1 if turn.quick else 4, seed=turn.seed)


RECOVERIES = Benchmark(
    "recoveries",
    measure,
    (
        Figure(1, "jobs not finished: 2 gloo ranks, one SIGKILLed, 1 restart", "", "unfinished", (Goal(0),), fold=sum),
        Figure(1, "jobs run", "", "count", fold=sum),
    ),
)


def main() -> int:
    """The campaign as a command: 0 when all jobs of elasticlib recovered."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recoveries", description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="elasticlib")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = list(LAUNCHERS.values()) if options.launcher == "both" else [LAUNCHERS[options.launcher]]
    code = 0
    for launcher in chosen:
        result = campaign(
            launcher, options.jobs, options.seed, report=lambda text: print(text, file=sys.stderr, flush=True)
        )
        for each in result.jobs:
            if not each.finished and launcher.name == "elasticlib":
                print(each.complaints, file=sys.stderr)
        print(f"{launcher.name}: {result} (seed {options.seed})", flush=True)
        if launcher.name == "elasticlib" and result.unfinished:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
