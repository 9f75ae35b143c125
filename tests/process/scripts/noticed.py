"""
Training without torch that handles SIGUSR1 or SIGTERM on its own, and makes steps of 10 ms.

The variables HANDLES (a signal's name), CONTINUES (1: the handler only says so) and LAST (the number of steps)
change it.
"""

from __future__ import annotations

import os
import signal
import time


def print_line(*parts: object) -> None:
    print(" ".join(map(str, parts)) + "\n", end="", flush=True)


def main() -> None:
    noticed: list[int] = []
    if name := os.environ.get("HANDLES"):
        signal.signal(signal.Signals[name], lambda signum, _: noticed.append(signum))
    for step in range(int(os.environ.get("LAST", "1000000"))):
        if step == 5:
            print_line("rank", os.environ["RANK"], "works as", os.getpid())
        time.sleep(0.01)
        if noticed and os.environ.get("CONTINUES") == "1":
            noticed.clear()
            print_line("noticed by", os.environ["RANK"])
        elif noticed:
            print_line("saved by", os.environ["RANK"])
            return
    print_line("done by", os.environ["RANK"])


if __name__ == "__main__":
    main()
