"""
A notebook's kernel under a user's hands: cells that are run again, interrupted, and kernels that are killed.

``python -m tests.benchmarks.kernels [--interrupts 100] [--kills 20] [--runs 20] [--seed 0] [--no-lines] [--no-flat]``.
Before them come the lines that workers write (`kernel_lines`) and a long day (`kernel_flat`). Each interrupt comes at a
random moment of a cell that launches workers which train for ever; then nothing of the launch may be left, the cell
must have ended, and the next cell must work. Each kill ends a kernel that has such a cell under way, by SIGKILL.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from tests.benchmarks import kernel_flat, kernel_lines
from tests.benchmarks.kernel import SETUP, Kernel, everything, kernel


def seconds_until_empty(left: Any, limit: float = 5.0) -> float:
    """Seconds until *left* finds nothing; raises SystemExit with what it finds."""
    began = time.monotonic()
    while found := left():
        if time.monotonic() - began > limit:
            raise SystemExit(f"left: {found}")
        time.sleep(0.01)
    return time.monotonic() - began


def interrupts(count: int, randoms: random.Random) -> None:
    """Interrupt *count* cells."""
    times, errors = [], set()
    with kernel(4) as made:
        for _ in range(count):
            number = made.begin("elastic_launch(config, trains)(1000)")
            made.until_begun(number)
            time.sleep(randoms.choice([randoms.uniform(0, 0.1), randoms.uniform(0, 1.0)]))  # the moment is the test
            began = time.monotonic()
            made.interrupt()
            error = made.until_idle(number).error
            times.append(time.monotonic() - began)
            errors.add(error)
            seconds_until_empty(made.left)
            if made.run("elastic_launch(config, trains)(0)").error:
                raise SystemExit("the cell after an interrupt failed")
    print(
        f"{count} interrupts: nothing left, next cells worked, errors {sorted(errors)}; cell ended after "
        f"{statistics.median(times):.3f} s (median), {max(times):.3f} s (most)"
    )


def kills(count: int, randoms: random.Random) -> None:
    """Kill *count* kernels."""
    times = []
    for _ in range(count):
        made = Kernel()
        made.run(SETUP.format(workers=4, method="forkserver"))
        made.begin("elastic_launch(config, trains)(1000)")
        time.sleep(randoms.uniform(0, 4.0))  # the moment is the test
        made.kill()
        times.append(seconds_until_empty(lambda mark=made.mark: everything(mark)))
        made.close()
    middle, most = statistics.median(times), max(times)
    print(f"{count} kernels killed: nothing left, after {middle:.3f} s (median), {most:.3f} s (most)")


CALLS = {
    "elasticlib": ("forkserver", "elastic_launch(config, changed)()"),
    "elasticlib, spawn": ("spawn", "elastic_launch(config, changed)()"),
    "accelerate": ("forkserver", "debug_launcher(changed, (), num_processes=4)"),
}
"""Start method, and the call: accelerate's notebook launcher as it is without GPUs."""


def runs(count: int) -> None:
    """Seconds from a changed cell's start to its first line, in the notebook."""
    for name, (method, call) in CALLS.items():
        times = []
        with kernel(4, method) as made:
            if name == "accelerate" and made.run("from accelerate import debug_launcher").error:
                continue
            for number in range(count if name == "elasticlib" else max(2, count // 5)):
                began = time.monotonic()
                ended = made.run(f"def changed():\n    print('first line', {number}, flush=True)\n\n{call}").ok()
                times.append(ended.first("first line") - began)
        print(
            f"changed cell, 4 workers, {name}: first line after {statistics.median(times[1:]):.3f} s, {len(times)} runs"
        )


def main() -> int:
    """The campaign: 0 when nothing was left and each goal is reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels", description=main.__doc__)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lines", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--flat", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    randoms = random.Random(options.seed)
    is_reached = True
    if options.runs:
        runs(options.runs)
    if options.lines:
        is_reached = kernel_lines.delays() and is_reached
        is_reached = kernel_lines.costs() and is_reached
    if options.flat:
        is_reached = kernel_flat.flat() and is_reached
    if options.interrupts:
        interrupts(options.interrupts, randoms)
    if options.kills:
        kills(options.kills, randoms)
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
