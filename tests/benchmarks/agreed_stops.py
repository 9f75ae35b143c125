"""
Stops at a step on which all ranks agree, many times, and the cost of asking for one.

``python -m tests.benchmarks.agreed_stops --runs 1000`` launches a function on 8 ranks, whose steps have lengths of
their own, and asks for the stop at a drawn moment. In every tenth run a rank is killed at the request, in another
tenth one rank never asks. It prints how often the ranks that returned a step returned the same one, and the time of a
call without a request. It exits with 0 if they always did.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter

from attrs import frozen

from elasticlib import LaunchConfig, PreemptedError, SignalException, elastic_launch, progress, should_stop
from elasticlib.errors import ElasticError

RANKS = 8
CALLS = 200_000
GRACE, LONG_GRACE = 3.0, 30.0
"""Seconds that the ranks have: a run with one that never asks takes all of them, others end as soon as all returned."""
LIMIT = 60.0


@frozen
class Outcome:
    """One run."""

    kind: str
    steps: tuple[int, ...]
    """Of the ranks that returned one."""

    @property
    def is_right(self) -> bool:
        """Return whether no two ranks returned different steps and all required ranks returned one."""
        due = {"all ask": RANKS, "one never asks": RANKS - 1, "one is killed": 0}[self.kind]
        return len(set(self.steps)) <= 1 and len(self.steps) >= due


def train(folder: str, silent: int | None) -> int:
    """Make steps until the stop; each rank notes the step at which it stopped."""
    rank = int(os.environ["RANK"])
    draw = random.Random(rank)
    step = 0
    while True:
        step += 1
        progress(step)
        time.sleep(draw.random() * 0.004)
        if rank != silent and should_stop() is not None:
            with open(f"{folder}/{rank}", "w") as file:
                file.write(str(step))
            return step


def cost() -> float:
    """Seconds of a call without a request, in a worker."""
    began = time.perf_counter()
    for _ in range(CALLS):
        should_stop()
    return (time.perf_counter() - began) / CALLS


def run(kind: str, draw: random.Random, folder: str) -> Outcome:
    """Launch the ranks, ask them to stop, and read the steps at which they did."""
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    silent = draw.randrange(RANKS) if kind == "one never asks" else None
    grace = LONG_GRACE if silent is None else GRACE
    config = LaunchConfig(nproc_per_node=RANKS, preload=(), max_restarts=0, shutdown_timeout=grace)
    job = elastic_launch(config, train).start(folder, silent)
    deadline = time.monotonic() + LIMIT
    while sum((rank.step or 0) > 2 for rank in job.status().ranks) < RANKS:
        if time.monotonic() > deadline:
            raise SystemExit(f"the ranks did not start in {LIMIT:g} s: {job.status()}")
        time.sleep(0.005)

    time.sleep(draw.random() * 0.05)
    victim = job.status().ranks[draw.randrange(RANKS)].pid if kind == "one is killed" else None
    # As a signal to this program would.
    job.inbox.put(signal.SIGTERM)
    if victim is not None:
        time.sleep(draw.random() * 0.04)
        os.kill(victim, signal.SIGKILL)
    try:
        job.result()
    except (PreemptedError, SignalException, ElasticError):
        pass
    return Outcome(kind, tuple(int(open(f"{folder}/{name}").read()) for name in os.listdir(folder)))


def main() -> int:
    """The campaign as a command."""
    parser = argparse.ArgumentParser(description="Stops at a step on which all ranks agree.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    kinds = ("one never asks", "one is killed", *["all ask"] * 8)
    right: Counter[str] = Counter()
    all_of: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.runs):
            outcome = run(kinds[number % len(kinds)], draw, folder)
            all_of[outcome.kind] += 1
            right[outcome.kind] += outcome.is_right
            if not outcome.is_right:
                print(f"run {number}, {outcome.kind}: {sorted(outcome.steps)}", flush=True)
    costs = elastic_launch(LaunchConfig(nproc_per_node=2, preload=()), cost)()
    for kind in all_of:
        print(f"{kind}: {right[kind]} of {all_of[kind]}")
    print(f"a call without a request: {1e9 * statistics.median(costs.values()):.0f} ns")
    return 0 if right == all_of else 1


if __name__ == "__main__":
    sys.exit(main())
