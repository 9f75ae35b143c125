"""
Starts under a high limit of open files against starts under a low one: ``python -m tests.benchmarks.open_files``.

On a stand-in (`tests/shims/open_files.c`) for an interpreter without ``close_range``, where closing by the limit costs
a system call for each number below it: 1,048,576 is what Docker gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.job import launched, started
from tests.benchmarks.launchers import ELASTICLIB
from tests.shims import built

LOW, HIGH = 4096, 1_048_576
WORKERS = 8
MOST = 1.2


def seconds(limit: int, shim: dict[str, str], workers: int = WORKERS) -> float:
    """From the command to the last worker's first line, with *limit* open files. Raises `BenchmarkError`."""
    variables = [f"{name}={value}" for name, value in {**shim, "OPEN_FILES": str(limit)}.items()]
    command = launched(ELASTICLIB, "bare.py", workers=workers, options=("--preload", ""))
    with started(["env", *variables, *command]) as job:
        up = job.when("up", workers)
        with job.opened():
            job.succeeded()
        return max(up.values()) - job.started


def pairs(count: int) -> list[tuple[float, float]]:
    """Seconds under the low limit and under the high one, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        shim = built("open_files", Path(folder))
        return [(seconds(LOW, shim), seconds(HIGH, shim)) for _ in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 when a high limit costs no more than it may, 1 when it does."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.open_files", description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    found = pairs(parser.parse_args(arguments).pairs)
    low, high = (statistics.median(values) for values in zip(*found, strict=True))
    print(f"start of {WORKERS} workers, medians of {len(found)} pairs: {low:.3f} s with {LOW} open files, ", end="")
    print(f"{high:.3f} s with {HIGH}: {high / low:.2f}x (at most {MOST}x)")
    return 0 if high / low <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
