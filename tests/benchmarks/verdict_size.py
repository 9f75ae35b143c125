"""
Failures too large to write down: how long until all nodes of a job know how it ended, and why.

N nodes with W workers each, all of which fail at once and for good, each with a message and a traceback of so many
characters: seconds from the first report to the last node that was told the verdict, through one c10d store and
through one etcd. ``python -m tests.benchmarks.verdict_size --nodes 32,1000``. As in `forming`, a few processes play
the nodes and another one coordinates, on one machine (a network namespace): all nodes share its processors.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

from tests.benchmarks.forming import playing
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import ELASTICLIB
from tests.hosts._netns import machines, missing
from tests.hosts._team import ETCD_PORT, STORE_PORT, etcd

BACKENDS = ("c10d", "etcd")
WORKERS = 8
LENGTH = 20_000
MEMORY = Path("/dev/shm")
"""Folder of etcd's files, in memory: the etcd of a real job has a disk of its own."""
PROGRAMS = 4
"""Number of programs that play the nodes."""
LIMIT = 300.0
"""Seconds for all of one job."""
HEARTBEAT = 60.0
"""Seconds: a thousand nodes share the processors of one machine, and some get no turn for a while."""


@frozen
class Verdict:
    """Result of one job."""

    seconds: float
    """From the first report of a failure to the last node that was told how the job ended."""
    root: int
    """Characters of the root cause's message and traceback that each node was told, at least."""


def measure(
    backend: str, nodes: int, workers: int = WORKERS, length: int = LENGTH, heartbeat: float = HEARTBEAT
) -> Verdict:
    """Let all workers of so many nodes fail. Raises `BenchmarkError` when the verdict does not come within `LIMIT`."""
    if why := missing():
        raise BenchmarkError(why)
    with ExitStack() as stack:
        (host,) = stack.enter_context(machines(1))
        if backend != "c10d":
            stack.enter_context(etcd(host, MEMORY))
        endpoint = f"{host.address}:{STORE_PORT if backend == 'c10d' else ETCD_PORT}"
        more = (backend, str(heartbeat))
        team = stack.enter_context(playing(ELASTICLIB, nodes, host, endpoint, more, PROGRAMS))
        timer = threading.Timer(LIMIT, team.end)
        stack.callback(timer.cancel)
        timer.start()
        print(f"{nodes} nodes connected in {team.run('connect'):.2f} s", file=sys.stderr, flush=True)
        print(f"{nodes} nodes seated in {team.run('form'):.2f} s", file=sys.stderr, flush=True)
        team.run(f"write {workers} {length}", numbers=False)
        return Verdict(team.run("fail"), team.root)


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Seconds to the verdict."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.verdict_size", description=main.__doc__)
    parser.add_argument("--nodes", type=_numbers, default=(32, 1000), help="sizes (32,1000)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="all, if not given")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"of each node ({WORKERS})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"characters of each text ({LENGTH})")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT, help=f"the job's, in seconds ({HEARTBEAT:g})")
    options = parser.parse_args()
    missed = False
    for nodes in options.nodes:
        for backend in options.backends:
            case = f"{backend}, {nodes} nodes x {options.workers} failures x 2 texts of {options.length} characters"
            try:
                found = measure(backend, nodes, options.workers, options.length, options.heartbeat)
            except BenchmarkError as error:
                missed = True
                print(f"{case}: no verdict: {error}", flush=True)
            else:
                print(f"{case}: {found.seconds:.2f} s, {found.root} characters of the root cause", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
