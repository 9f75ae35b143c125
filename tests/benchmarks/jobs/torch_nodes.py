"""
Several nodes of torch's c10d rendezvous in one process, each a thread with a connection of its own.

Usage: ``python -m tests.benchmarks.jobs.torch_nodes ENDPOINT TOTAL FIRST COUNT``: nodes FIRST to FIRST + COUNT - 1 of
TOTAL; with COUNT 0 the process hosts the store. Each line on stdin is a command, and a line on stdout answers it:
``connect``; ``form``: all ask for the first round; ``again NODE``: node NODE asks for the next round, all others when
they see it waiting. The answer is JSON: when the first asked, when the last was in, and all ranks (or numbers, before
there are ranks).
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

MONITOR_INTERVAL = 0.1
"""Seconds between two looks for waiting nodes: what torchrun's agent takes when it is not told."""


def _connect(endpoint: str, total: int, is_host: bool) -> Any:
    parameters = RendezvousParameters(
        "c10d",
        endpoint,
        "forming",
        total,
        total,
        local_addr="127.0.0.1",
        is_host=str(is_host),
        timeout=600,
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def _form(handler: Any) -> tuple[float, int]:
    rank: int = handler.next_rendezvous().rank
    return time.monotonic(), rank


def _form_when_waiting(handler: Any) -> tuple[float, int]:
    while not handler.num_nodes_waiting():
        time.sleep(MONITOR_INTERVAL)
    return _form(handler)


def main() -> None:
    """Do what stdin says until it ends."""
    endpoint, total, first, count = sys.argv[1], *map(int, sys.argv[2:])
    numbers = range(first, first + count)
    handlers: dict[int, Any] = {}
    if not count:
        handlers[first] = _connect(endpoint, total, is_host=True)
    with ThreadPoolExecutor(max(count, 1)) as pool:

        def all_of_them(work: Callable[[int], Any]) -> list[Any]:
            if not count:
                return []
            together = threading.Barrier(count)

            def one(number: int) -> Any:
                together.wait()
                return work(number)

            return list(pool.map(one, numbers))

        def connected(number: int) -> tuple[float, int]:
            handlers[number] = _connect(endpoint, total, is_host=False)
            return time.monotonic(), number

        for line in sys.stdin:
            began = time.monotonic()
            found: list[tuple[float, int]] = []
            match line.split():
                case ["connect"]:
                    found = all_of_them(connected)
                case ["form"]:
                    found = all_of_them(lambda each: _form(handlers[each]))
                case ["again", node]:
                    found = all_of_them(
                        lambda each: _form(handlers[each]) if each == int(node) else _form_when_waiting(handlers[each])
                    )
            answer = {"began": began, "done": max((at for at, _ in found), default=0.0), "ranks": [r for _, r in found]}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
