"""
Lines of workers in a notebook's cell: how long after their writing they come, and what they cost the kernel.

Rules of this file: a line has the machine's monotonic time of its writing; it has come when a front end has its
message.
"""

from __future__ import annotations

import re
import statistics

from attrs import frozen

from tests.benchmarks.kernel import Ended, Kernel, kernel

WORKERS = 8
BEAT = re.compile(r"beat (\d+) step \d+ time (\d+\.\d{6})\.$")
MOST_BEHIND = 0.1
MOST_CPU = 0.02
"""Of a core, more than the same job without output."""
IMPORTS = """
import time
from tests.benchmarks.jobs.cells import writes
"""
OURS = "elastic_launch(LaunchConfig(nproc_per_node={workers}, show={show}), writes)(-1, {count}, {pause})"
WAYS = {
    "elasticlib, rank 0 of 8": (1, "", OURS.replace("{show}", "None")),
    "elasticlib, all of 8": (8, "", OURS.replace("{show}", "'all'")),
    "torch.multiprocessing.spawn": (
        8,
        "import torch.multiprocessing",
        "torch.multiprocessing.spawn(writes, ({count}, {pause}), nprocs={workers})",
    ),
    "accelerate's debug_launcher": (
        8,
        "from accelerate import debug_launcher",
        "debug_launcher(writes, (-1, {count}, {pause}), num_processes={workers})",
    ),
}
"""Number of ranks shown, imports, and call of each way."""


@frozen
class Behind:
    """Seconds from a line's writing to its arrival at the front end."""

    median: float
    late: float
    """95% come sooner."""
    most: float
    lines: int
    missing: int
    """Lines that did not come, or not as they were written."""


def behind(ended: Ended, expected: int) -> Behind:
    """Return the delays of a cell's lines, *expected* in number."""
    delays = []
    begun = ""
    for at, text in ended.texts:
        *whole, begun = (begun + text).split("\n")
        delays += [at - float(found[2]) for line in whole if (found := BEAT.search(line))]
    late = statistics.quantiles(delays, n=20)[-1]
    return Behind(statistics.median(delays), late, max(delays), len(delays), expected - len(delays))


def delays(count: int = 100, pause: float = 0.05) -> bool:
    """Measure each of `WAYS`; whether ours are soon enough."""
    is_reached = True
    for name, (seen, imports, call) in WAYS.items():
        with kernel(WORKERS) as made:
            if made.run(IMPORTS + imports).error:
                print(f"lines in the cell, {name}: not installed")
                continue
            code = call.format(workers=WORKERS, count=count, pause=pause)
            found = behind(made.run(code, limit=count * pause + 300).ok(), seen * count)
        print(
            f"lines in the cell, a line each {pause:g} s of each of 8 workers, {name}: {found.median:.3f} s later "
            f"(median), {found.late:.3f} s (95%), {found.most:.3f} s (most); {found.lines} lines came whole, "
            f"{found.missing} did not",
            flush=True,
        )
        if name.startswith("elasticlib"):
            is_reached = is_reached and found.late <= MOST_BEHIND and not found.missing
    return is_reached


def _spent(made: Kernel, show: str, count: int, pause: float, is_loud: bool) -> float:
    call = (
        f"elastic_launch(LaunchConfig(nproc_per_node={WORKERS}, show={show}), writes)(-1, {count}, {pause}, {is_loud})"
    )
    code = f"cpu, wall = time.process_time(), time.monotonic()\n{call}\nprint('\\nspent', time.process_time() - cpu)"
    ended = made.run(code, limit=count * pause + 60).ok()
    if is_loud:
        found = behind(ended, count * (WORKERS if "all" in show else 1))
        if found.missing:
            raise SystemExit(f"{found.missing} lines are missing")
    return float(ended.text.split()[-1])


def costs(count: int = 500, pause: float = 0.01, pairs: int = 5) -> bool:
    """CPU of a kernel whose workers write, more than of the same silence; whether that is little enough."""
    is_reached = True
    with kernel(WORKERS) as made:
        made.run(IMPORTS).ok()
        found: dict[str, list[float]] = {"silent": [], "None": [], "'all'": []}
        for _ in range(pairs):
            for name, spent in found.items():
                is_loud = name != "silent"
                spent.append(_spent(made, name if is_loud else "'all'", count, pause, is_loud))
    silence = statistics.median(found.pop("silent"))
    for name, spent in found.items():
        more = [(each - silence) / (count * pause) for each in spent]
        print(
            f"8 workers, {1 / pause:g} lines/s each for {count * pause:g} s, show={name}: the kernel has spent "
            f"{statistics.median(spent):.3f} s of CPU, silent {silence:.3f} s: {statistics.median(more):.2%} of a core "
            f"more (from {min(more):.2%} to {max(more):.2%})",
            flush=True,
        )
        is_reached = is_reached and statistics.median(more) < MOST_CPU
    return is_reached
