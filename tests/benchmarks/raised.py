"""Promise 16: a worker that raised but lives on (a thread of it works) is known at once: when are its peers stopped?"""

from __future__ import annotations

from attrs import frozen

from tests.benchmarks import journal
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import BenchmarkError, launched, started
from tests.benchmarks.launchers import Launcher

WORKERS = 4
LIMIT = 20.0
"""Seconds after which peers count as never told: the value is then this one."""


@frozen
class Raised:
    """Seconds from the moment before the exception; `LIMIT` for what never came."""

    peers: float
    """To the last peer that was told to stop."""


def measure(launcher: Launcher, turn: Turn) -> Raised:
    """Run one job whose rank 0 raises and does not end; it is killed afterwards."""
    with started(launched(launcher, "raised.py", workers=WORKERS)) as job:
        job.when("up", WORKERS)
        with job.opened():
            raised = job.when("raised", 1)[0]
        try:
            stopped = job.when("notified", WORKERS - 1, limit=LIMIT)
        except BenchmarkError:
            stopped = journal.select(job.marks(), "notified")
        if len(stopped) < WORKERS - 1:
            return Raised(LIMIT)
        return Raised(max(stopped.values()) - raised)


RAISED = Benchmark(
    "raised, but alive",
    measure,
    (
        Figure(
            16,
            f"a worker that raised but lives on, to its {WORKERS - 1} peers told to stop ({LIMIT:g}: never)",
            "s",
            "peers",
            (Goal(0.1),),
        ),
    ),
)
