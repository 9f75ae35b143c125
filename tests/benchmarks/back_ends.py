"""
Each back end with a thousand nodes: ``python -m tests.benchmarks.back_ends --nodes 1000``.

Connections at the store, bytes a second of an idle job (with the headers of TCP), and seconds until all nodes are in
contact, until all have ranks, and from a failure until all have new ones. As in `forming`, a few processes play the
nodes, and one coordinates or hosts the server, on one machine (a network namespace): all share its processors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

from tests.benchmarks.forming import playing
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import ELASTICLIB
from tests.hosts._netns import Host, machines, missing
from tests.hosts._team import ETCD_PORT, STORE_PORT, etcd

BACKENDS = ("c10d", "served", "etcd", "static", "file")
HEARTBEAT = 10.0
IDLE = 20.0
"""Seconds for which an idle job is watched."""
LIMIT = 120.0
"""Seconds for all of one job."""
PROGRAMS = 4
"""Number of programs that play the nodes."""
MEMORY = Path("/dev/shm")
"""Folder of etcd's files, in memory: the etcd of a real job has a disk of its own."""


@frozen
class BackEnd:
    """One job through one back end."""

    connections: int
    bytes_per_second: float
    connected: float
    first: float
    again: float


def measure(backend: str, nodes: int, heartbeat: float = HEARTBEAT) -> BackEnd:
    """Let *nodes* nodes form two rounds. Raises `BenchmarkError` when that does not happen within `LIMIT`."""
    if why := missing():
        raise BenchmarkError(why)
    with ExitStack() as stack:
        (host,) = stack.enter_context(machines(1))
        endpoint, port = _endpoint(backend, host, stack)
        team = stack.enter_context(playing(ELASTICLIB, nodes, host, endpoint, (backend, str(heartbeat)), PROGRAMS))
        timer = threading.Timer(LIMIT, team.end)
        stack.callback(timer.cancel)
        timer.start()

        connected, first = team.run("connect"), team.run("form")
        before = host.loopback_bytes()
        time.sleep(IDLE)  # what is measured
        idle = (host.loopback_bytes() - before) / IDLE
        return BackEnd(host.connections(port) if port else 0, idle, connected, first, team.run("again 1"))


def _endpoint(backend: str, host: Host, stack: ExitStack) -> tuple[str, int]:
    """The endpoint of *backend*, and the port of its store."""
    if backend == "file":
        return f"{stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))}/store", 0
    if backend == "etcd":
        stack.enter_context(etcd(host, MEMORY))
        return f"{host.address}:{ETCD_PORT}", ETCD_PORT
    return f"{host.address}:{STORE_PORT}", STORE_PORT


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.back_ends", description=main.__doc__)
    parser.add_argument("--nodes", type=_numbers, default=(64, 1000), help="sizes (64,1000)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="all, if not given")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT, help=f"the job's, in seconds ({HEARTBEAT:g})")
    options = parser.parse_args()
    missed = False
    for nodes in options.nodes:
        for backend in options.backends:
            try:
                found = measure(backend, nodes, options.heartbeat)
            except BenchmarkError as error:
                missed = True
                print(f"{backend}, {nodes} nodes: no figures: {error}", flush=True)
                continue
            print(
                f"{backend}, {nodes} nodes: {found.connections} connections, idle {found.bytes_per_second / 1e3:.0f} "
                f"kB/s, connected {found.connected:.2f} s, first round {found.first:.2f} s, next {found.again:.2f} s",
                flush=True,
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
