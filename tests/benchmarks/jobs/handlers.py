"""
Many nodes of one job in one program, each a thread with a rendezvous handler of its own.

Usage: ``python -m tests.benchmarks.jobs.handlers PACKAGE COUNT ROUNDS ENDPOINT PART PARTS``, with PACKAGE
``elasticlib.elastic`` or ``torch.distributed.elastic``. The COUNT nodes are spread over PARTS programs, of which this
is number PART. A line on stdout is JSON: seconds from the program's start to the first round, and those of each later
one, which a node asks for and the others join when they see it waiting. The program ends when its stdin does.
"""

from __future__ import annotations

import importlib
import json
import os
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
    package, endpoint = sys.argv[1], sys.argv[4]
    count, rounds, part, parts = (int(sys.argv[position]) for position in (2, 3, 5, 6))
    rendezvous: Any = importlib.import_module(f"{package}.rendezvous")
    registry: Any = importlib.import_module(f"{package}.rendezvous.registry")
    parameters = rendezvous.RendezvousParameters("c10d", endpoint, "job", count, count, local_addr="127.0.0.1")
    nodes = range(part, count, parts)
    handlers = {node: registry.get_rendezvous_handler(parameters) for node in nodes}

    def form(node: int, waits: bool) -> int:
        while waits and node and not handlers[node].num_nodes_waiting():
            time.sleep(LOOK)
        rank: int = handlers[node].next_rendezvous().rank
        return rank

    took = []
    with ThreadPoolExecutor(len(nodes)) as pool:
        for number in range(rounds + 1):
            began = time.monotonic()
            ranks = list(pool.map(form, nodes, [number > 0] * len(nodes)))
            took.append(time.monotonic() - began if number else _age())
            assert len(set(ranks)) == len(nodes) and set(ranks) <= set(range(count)), ranks
    print(json.dumps(took), flush=True)
    sys.stdin.read()  # until all programs have their rounds: one of them hosts the store
    os._exit(0)


if __name__ == "__main__":
    main()
