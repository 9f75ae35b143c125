"""Waiting time of a command line user before a launch: the help text and the import."""

from __future__ import annotations

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import started
from tests.benchmarks.launchers import Launcher


@frozen
class Commands:
    """Seconds of whole processes, interpreter included."""

    help: float
    imported: float
    bare: float
    """An interpreter that does nothing."""


def _seconds(*command: str) -> float:
    with started(command) as job:
        return job.succeeded() - job.started


def measure(launcher: Launcher, turn: Turn) -> Commands:
    """Run each command once. Raises `BenchmarkError` when one fails."""
    return Commands(
        help=_seconds(*launcher.command, "--help"),
        imported=_seconds(launcher.python, "-c", f"import {launcher.interface}"),
        bare=_seconds(launcher.python, "-c", "pass"),
    )


COMMANDS = Benchmark(
    "commands",
    measure,
    (
        Figure(None, "`--help`", "s", "help", (Goal(0.2),)),
        Figure(None, "importing the library", "s", "imported"),
        Figure(None, "an interpreter that does nothing", "s", "bare"),
    ),
)
