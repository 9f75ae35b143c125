"""
Promise 9: the cluster forms at once. Many nodes, each with connections of its own, through one c10d store.

The nodes are played by two processes, the store is hosted by a third, on a machine (a network namespace) whose name
server says no at once. Sizes beyond what a launcher can form are left out for it. One job of all sizes:
``python -m tests.benchmarks.forming --nodes 4,16,64,256,1000 --dns silent``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from attrs import define, frozen

from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import ROOT, BenchmarkError
from tests.benchmarks.launchers import LAUNCHERS, Launcher
from tests.hosts._netns import Dns, Host, machines, missing

_ENDPOINT = "127.0.0.1:29400"


@frozen
class Rounds:
    """Seconds; None where this was not measured."""

    connected: float | None = None
    """From no connection to all nodes in contact with the store."""
    first: float | None = None
    """From the first node that asks to the last that has its rank."""
    again: float | None = None
    """From a node's failure to the last node that has its new rank."""


@define
class Nodes:
    """The processes that play the nodes."""

    count: int
    _processes: list[subprocess.Popen[str]]
    root: int = 0
    """Characters of the root cause that each node was told, at least, when last it was told one."""

    def run(self, command: str, numbers: bool = True) -> float:
        """Run *command* in all processes; return seconds from first start to end. Raises `BenchmarkError`."""
        for process in self._processes:
            _stream(process.stdin).write(f"{command}\n")
            _stream(process.stdin).flush()
        answers = []
        for process in self._processes:
            line = _stream(process.stdout).readline()
            if not line:
                raise BenchmarkError(f"a process of {self.count} nodes ended with {process.wait()} amid {command!r}")
            answers.append(json.loads(line))
        found = sorted(number for answer in answers for number in answer["ranks"])
        if numbers and found != list(range(self.count)):
            raise BenchmarkError(f"{self.count} nodes were told {command!r} and got the numbers {found}")
        busy = [answer for answer in answers if answer["ranks"]]
        self.root = min((answer.get("root", 0) for answer in busy), default=0)
        began, done = ([answer[key] for answer in busy] for key in ("began", "done"))
        return float(max(done) - min(began)) if busy else 0.0

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()


def _stream(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


@contextmanager
def playing(
    launcher: Launcher, count: int, host: Host, endpoint: str = _ENDPOINT, more: Sequence[str] = (), programs: int = 2
) -> Iterator[Nodes]:
    """So many nodes on *host*, in so many *programs*, and one that coordinates; *more*: what these are told besides."""
    firsts = [count * number // programs for number in range(programs + 1)]
    shares = [(-1, 0), *((first, after - first) for first, after in itertools.pairwise(firsts))]
    processes: list[subprocess.Popen[str]] = []
    try:
        for first, share in shares:
            command = [launcher.python, "-m", launcher.nodes, endpoint, str(count), str(first), str(share), *more]
            process = subprocess.Popen(
                host.entered(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **launcher.node_variables},
            )
            processes.append(process)
        nodes = Nodes(count, processes)
        nodes.run("begin", numbers=False)  # all imports are done, and the store serves
        yield nodes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def form(launcher: Launcher, count: int, dns: Dns = Dns.NONE) -> Rounds:
    """Let *count* nodes form two rounds. Raises `BenchmarkError` when they do not."""
    if launcher.most_nodes is not None and count > launcher.most_nodes:
        return Rounds()
    if why := missing():
        raise BenchmarkError(why)
    with machines(1, dns) as (host,), playing(launcher, count, host) as nodes:
        return Rounds(nodes.run("connect"), nodes.run("form"), nodes.run("again 1"))


def measure(launcher: Launcher, turn: Turn, count: int, dns: Dns = Dns.NONE) -> Rounds:
    """Form the rounds of one size."""
    return form(launcher, count, dns)


def _of_size(count: int, *goals: Goal) -> Benchmark:
    return Benchmark(
        f"forming, {count} nodes",
        functools.partial(measure, count=count),
        (
            Figure(9, f"first round of {count} nodes", "s", "first", goals),
            Figure(9, f"next round of {count} nodes", "s", "again", goals),
            Figure(9, f"{count} nodes, no connection to all connected", "s", "connected"),
        ),
    )


FORMING = (
    _of_size(4),
    _of_size(16),
    _of_size(64, Goal(0.1, Of.RATIO)),
    _of_size(256, Goal(0.6)),
    _of_size(1000, Goal(3.0)),
    Benchmark(
        "forming, 1000 nodes, no answer from the name server",
        functools.partial(measure, count=1000, dns=Dns.SILENT),
        (
            Figure(9, "first round of 1000 nodes, name server silent", "s", "first", (Goal(3.0),)),
            Figure(9, "next round of 1000 nodes, name server silent", "s", "again", (Goal(3.0),)),
        ),
    ),
)


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Rounds of several sizes, as a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.forming", description=main.__doc__)
    parser.add_argument("--nodes", type=_numbers, default=(4, 16, 64), help="sizes (4,16,64)")
    parser.add_argument("--dns", type=Dns, choices=list(Dns), default=Dns.NONE, help="none or silent")
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="both")
    options = parser.parse_args()
    chosen = list(LAUNCHERS.values()) if options.launcher == "both" else [LAUNCHERS[options.launcher]]
    for count in options.nodes:
        for launcher in chosen:
            found = form(launcher, count, options.dns)
            texts = [
                f"{name} {'-' if value is None else f'{value:.3f} s'}"
                for name, value in (("connected", found.connected), ("first", found.first), ("next", found.again))
            ]
            print(f"{count} nodes, {launcher.name}: {', '.join(texts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
