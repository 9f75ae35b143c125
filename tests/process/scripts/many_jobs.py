"""
Open many jobs of one node at once: ``many_jobs.py ENDPOINT COUNT``.

Each is a torch handler in a thread. Why one did not open is printed, and then how many did; all close at the end of
stdin.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from elasticlib.elastic.rendezvous import RendezvousParameters
from elasticlib.elastic.rendezvous.registry import get_rendezvous_handler


def main() -> None:
    endpoint, count = sys.argv[1], int(sys.argv[2])
    parameters = [
        RendezvousParameters("c10d", endpoint, f"job{number}", 1, 1, local_addr="127.0.0.1") for number in range(count)
    ]
    handlers = [get_rendezvous_handler(each) for each in parameters]

    def opens(number: int) -> bool:
        try:
            return handlers[number].next_rendezvous().world_size == 1
        except Exception as error:
            print(f"job {number}: {error}\n", end="", flush=True)
            return False

    with ThreadPoolExecutor(count) as pool:
        opened = sum(pool.map(opens, range(count)))
        print(f"{opened} jobs are open\n", end="", flush=True)
        sys.stdin.read()
        list(pool.map(lambda handler: handler.shutdown(), handlers))


if __name__ == "__main__":
    main()
