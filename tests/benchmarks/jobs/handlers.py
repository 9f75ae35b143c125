"""
Many nodes of one job in one program, each a thread with a rendezvous handler of its own.

Usage: ``python -m tests.benchmarks.jobs.handlers PACKAGE COUNT ROUNDS``, with PACKAGE ``elasticlib.elastic`` or
``torch.distributed.elastic``. A line on stdout is JSON: seconds from the program's start to the first round, and those
of each later one, which a node asks for and the others join when they see it waiting.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOOK = 0.1
"""Seconds between two looks for waiting nodes: what torchrun's agent takes when it is not told."""


def _age() -> float:
    """Seconds since this program was started."""
    facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(facts[19]) / ticks


def main() -> None:
    """Form the rounds, and end as a program that wants nothing more."""
    package, count, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rendezvous: Any = importlib.import_module(f"{package}.rendezvous")
    registry: Any = importlib.import_module(f"{package}.rendezvous.registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    parameters = rendezvous.RendezvousParameters("c10d", endpoint, "job", count, count, local_addr="127.0.0.1")
    handlers = [registry.get_rendezvous_handler(parameters) for _ in range(count)]

    def form(node: int, waits: bool) -> int:
        while waits and node and not handlers[node].num_nodes_waiting():
            time.sleep(LOOK)
        rank: int = handlers[node].next_rendezvous().rank
        return rank

    took = []
    with ThreadPoolExecutor(count) as pool:
        for number in range(rounds + 1):
            began = time.monotonic()
            ranks = list(pool.map(form, range(count), [number > 0] * count))
            took.append(time.monotonic() - began if number else _age())
            assert sorted(ranks) == list(range(count)), ranks
    print(json.dumps(took), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
