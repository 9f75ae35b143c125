"""
A program that calls a function on the same workers again and again, and writes down what that took and left.

Usage: ``python -m tests.benchmarks.jobs.pools LAUNCHER WORKERS CALLS``; one line of JSON: median milliseconds of a call
that does nothing, and of one with an all_reduce of one number; kilobytes, descriptors and threads that the program has
more after all the calls than after a tenth of them. A library without a pool launches anew for each call, a hundredth
as often.
"""

import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.launchers import LAUNCHERS


def nothing() -> int:
    """Return 1: the function of the shortest call."""
    return 1


def all_reduced() -> float:
    """In the pool's own group."""
    import torch
    import torch.distributed as dist

    ours = torch.ones(1)
    dist.all_reduce(ours)
    return float(ours)


def all_reduced_alone() -> float:
    """With a group of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = all_reduced()
    dist.destroy_process_group()
    return found


def resources() -> tuple[int, int, int]:
    """Kilobytes, descriptors and threads of this program."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024, len(os.listdir("/proc/self/fd")), threading.active_count()


def milliseconds(call: Callable[[], dict[int, Any]], times: int, workers: int) -> float:
    """The median of *times* calls."""
    found = []
    for _ in range(times):
        before = time.perf_counter()
        results = call()
        found.append((time.perf_counter() - before) * 1000)
        if len(results) != workers:
            raise SystemExit(f"{workers} workers were asked for, results came from ranks {sorted(results)}")
    return statistics.median(found)


def main() -> None:
    """Make the calls that the command line asks for."""
    launcher = LAUNCHERS[sys.argv[1]]
    workers, calls = int(sys.argv[2]), int(sys.argv[3])
    library = importlib.import_module(launcher.interface)
    if hasattr(library, "pool"):
        with library.pool(workers) as pool:
            milliseconds(lambda: pool.run(nothing), calls // 10, workers)
            before = resources()
            plain = milliseconds(lambda: pool.run(nothing), calls - calls // 10, workers)
            after = resources()
            reduced = milliseconds(lambda: pool.run(all_reduced), calls // 10, workers)
    else:
        config = library.LaunchConfig(1, 1, workers, start_method="fork", max_restarts=0, **launcher.settings)
        again = max(3, calls // 1000)
        before = resources()
        plain = milliseconds(library.elastic_launch(config, nothing), again, workers)
        after = resources()
        reduced = milliseconds(library.elastic_launch(config, all_reduced_alone), again, workers)
    more = [late - early for early, late in zip(before, after, strict=True)]
    print(json.dumps({"plain": plain, "reduced": reduced, "more": more}), flush=True)


if __name__ == "__main__":
    main()
