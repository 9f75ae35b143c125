"""
Promise 7: nothing is left behind. The launcher, or a process between it and the workers, is SIGKILLed.

The workers have children in sessions of their own. The whole campaign:
``python -m tests.benchmarks.kills --rounds 100 --target all``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import BenchmarkError, Job, launched, new_folder, started
from tests.benchmarks.launchers import LAUNCHERS, Launcher

WORKERS = 4
LIMIT = 5.0
"""Seconds after the kill by which everything must be gone."""
LAUNCHER = "launcher"


@frozen
class Span:
    """When the workers of an undisturbed job came up, in seconds after its start."""

    first: float
    last: float

    def moment(self, draw: random.Random) -> float:
        """
        A moment for a kill: in half of the cases anywhere from the start to half as long again as the job needs to be
        up, else while workers are being started, which is short and where a child may not be known to anybody yet.
        """
        if draw.random() < 0.5:
            return draw.uniform(0.0, 1.5 * self.last)
        return draw.uniform(max(0.0, self.first - 0.15), self.last + 0.05)


@frozen
class Round:
    """One job that was disturbed."""

    target: str
    after: float
    """Seconds from the job's start to the kill."""
    survivors: tuple[str, ...]
    """Command lines of what was alive `LIMIT` seconds after the kill; the launcher is one of them."""
    exitcode: int | None
    """The launcher's; None when it did not end."""

    @property
    def complaint(self) -> str:
        """Return a description of the fault; empty if there is none."""
        if self.survivors:
            return f"{len(self.survivors)} left after {LIMIT:g} s: " + "; ".join(self.survivors)
        if self.target != LAUNCHER and not self.exitcode:
            return f"the launcher ended with {self.exitcode} although its {self.target} was killed"
        return ""


@frozen
class Kills:
    """Several rounds of one launcher."""

    rounds: tuple[Round, ...]
    strays: tuple[str, ...] = ()
    """Command lines of processes of any round that appeared only after its end was found clean."""

    @property
    def failed(self) -> int:
        """Rounds after which something was wrong; strays count as one more."""
        return sum(bool(each.complaint) for each in self.rounds) + bool(self.strays)

    @property
    def left(self) -> int:
        """Processes that outlived their job."""
        return sum(len(each.survivors) for each in self.rounds) + len(self.strays)

    @property
    def count(self) -> int:
        """Rounds that were run."""
        return len(self.rounds)

    def __str__(self) -> str:
        return f"{self.failed} of {self.count} rounds failed, {self.left} processes were left"


def targets(launcher: Launcher) -> tuple[str, ...]:
    """Return the processes that can be killed in a job of *launcher*."""
    return (LAUNCHER, *launcher.inner)


def find(target: str, launcher: int) -> tree.Process | None:
    """The process of a job that plays the part of *target*, None when it is not there (yet)."""
    processes = tree.table()
    if target == LAUNCHER:
        return processes.get(launcher)
    pids = tree.descendants([launcher], processes) - {launcher}
    played = {pid: _part(tree.command(pid)) for pid in pids}
    children = {pid: [each.pid for each in processes.values() if each.parent == pid] for pid in pids}
    # What is forked keeps its parent's command line: the first of a line is the one whose name it is.
    top = [pid for pid in pids if played[pid] == "reaper" and played.get(processes[pid].parent) != "reaper"]
    if target != "reaper":
        top = [child for pid in top for child in children[pid] if played.get(child) == "fork server"]
    if target == "spawner":
        top = [child for pid in top for child in children[pid] if child in played]
        # The spawner is the child that has workers; before there are any, the one that came first.
        top = [pid for pid in top if children[pid]] or top
    return min((processes[pid] for pid in top), key=lambda each: each.born, default=None)


def _part(command: str) -> str:
    # The reaper's command line holds that of the fork server, which it starts.
    if "_reaper.py" in command:
        return "reaper"
    return "fork server" if "workers.spawner._fork_server" in command or "_fork_server.py" in command else ""


def _await_target(target: str, job: Job, limit: float) -> tree.Process | None:
    deadline = time.monotonic() + limit
    while True:
        found = find(target, job.process.pid)
        if found is not None or time.monotonic() > deadline or job.process.poll() is not None:
            return found
        time.sleep(0.002)


def calibrate(launcher: Launcher, workers: int = WORKERS) -> Span:
    """Run one job undisturbed. Raises `BenchmarkError` when its workers do not come up."""
    with started(launched(launcher, "family.py", workers=workers)) as job:
        times = job.when("up", workers).values()
        return Span(min(times) - job.started, max(times) - job.started)


def one_round(
    launcher: Launcher, target: str, after: float, workers: int = WORKERS, parent: Path | None = None
) -> Round:
    """
    Kill *target* of a job *after* seconds, or as soon as it exists; whatever is left in the end is killed too.

    Raises `BenchmarkError` when the target never comes, or the launcher ended before the kill.
    """
    with started(launched(launcher, "family.py", workers=workers), parent=parent) as job:
        time.sleep(max(0.0, job.started + after - time.monotonic()))
        found = _await_target(target, job, limit=30.0)
        known = tree.of_job(job.process.pid, job.folder)
        if found is None:
            raise BenchmarkError(f"there was no {target} to kill:\n{job.complaints()}")
        os.kill(found.pid, signal.SIGKILL)
        at = time.monotonic() - job.started
        left = _left_of_helper(target, known, job) | tree.left_after(LIMIT, known, job.folder)
        survivors = tuple(sorted(tree.command(each.pid) or f"pid {each.pid}" for each in left))
        return Round(target, at, survivors, job.process.poll())


def _left_of_helper(target: str, known: Collection[tree.Process], job: Job) -> frozenset[tree.Process]:
    """
    Processes of a job that are still there although their helper, *target*, was killed; its launcher has ended then.

    A launcher ends as well, or starts its helpers again where no worker had begun: that one is killed in its turn.
    Workers that run do not need the fork server: they end with their launcher.
    """
    left = frozenset[tree.Process]()
    if target in ("reaper", "spawner"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(LIMIT)
        old = {(each.pid, each.born) for each in known if each.pid != job.process.pid}
        left = frozenset(each for each in tree.still_there((), job.folder) if (each.pid, each.born) in old)
    if target != LAUNCHER:
        job.process.kill()
    return left


def campaign(
    launcher: Launcher,
    rounds: int,
    seed: int,
    chosen: Sequence[str] = (LAUNCHER,),
    workers: int = WORKERS,
    report: Callable[[str], object] | None = None,
) -> Kills:
    """
    Run *rounds* rounds that kill *chosen* targets in turn at moments drawn from *seed*; *report* hears of each.

    Raises `ValueError` for a target that the launcher does not have.
    """
    unknown = set(chosen) - set(targets(launcher))
    if unknown:
        raise ValueError(f"{launcher.name} has no {', '.join(sorted(unknown))}; it has {', '.join(targets(launcher))}")
    draw = random.Random(seed)
    span = calibrate(launcher, workers)
    done: list[Round] = []
    with new_folder() as folder:
        for number in range(rounds):
            each = one_round(launcher, chosen[number % len(chosen)], span.moment(draw), workers, folder)
            done.append(each)
            if report is not None:
                end = each.complaint or "clean"
                report(f"{launcher.name} round {number + 1}/{rounds}: {each.target} at {each.after:.3f} s: {end}")
        strays = tree.left_after(0.5, (), folder)
        found = tuple(sorted(tree.command(each.pid) for each in strays))
        tree.kill_all(strays, folder)
    return Kills(tuple(done), found)


@frozen
class Left:
    """Results of a few rounds of kills."""

    failed: int
    count: int
    left: int
    inner_failed: int | None
    """Failed rounds of those that killed a process between launcher and workers; None where there is none."""


def measure(launcher: Launcher, turn: Turn) -> Left:
    """A few rounds that kill the launcher, and one for each process between it and the workers."""
    outer = campaign(launcher, rounds=1 if turn.quick else 4, seed=turn.seed)
    inner = launcher.inner and campaign(launcher, len(launcher.inner), turn.seed, launcher.inner)
    return Left(outer.failed, outer.count, outer.left, inner.failed if isinstance(inner, Kills) else None)


KILLS = Benchmark(
    "kills",
    measure,
    (
        Figure(7, "rounds with survivors 5 s after the launcher's SIGKILL", "", "failed", (Goal(0),), fold=sum),
        Figure(7, "rounds run", "", "count", fold=sum),
        Figure(7, "processes left in them", "", "left", fold=sum),
        Figure(7, "failed rounds, a process in between killed", "", "inner_failed", (Goal(0),), fold=sum),
    ),
)


def main() -> int:
    """The campaign as a command: 0 when no round of elasticlib failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kills", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--target", choices=[LAUNCHER, *LAUNCHERS["elasticlib"].inner, "all"], default=LAUNCHER)
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="elasticlib")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    code = 0
    for launcher in LAUNCHERS.values() if options.launcher == "both" else [LAUNCHERS[options.launcher]]:
        chosen = targets(launcher) if options.target == "all" else (options.target,)
        try:
            result = campaign(
                launcher,
                options.rounds,
                options.seed,
                chosen,
                report=lambda text: print(text, file=sys.stderr, flush=True),
            )
        except ValueError as error:
            parser.error(str(error))
        for stray in result.strays:
            print(f"stray: {stray}", file=sys.stderr)
        print(f"{launcher.name}: {result} (seed {options.seed})", flush=True)
        if launcher.name == "elasticlib" and result.failed:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
