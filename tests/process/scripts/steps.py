"""
Training without torch: each rank makes steps of its own length, and returns when it should stop.

The variables SILENT (a rank that never asks), DIES (a rank that is killed at the request), LAST (the number of steps),
STUBBORN (a rank, or all, that goes on after its `Stop`), BEGINS (a file before which no rank makes a step), FAILS (a
rank that fails in the first round) and STACKS (a rank that writes its stacks at SIGUSR1) change what ranks do.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import elasticlib


def rank() -> int:
    return int(os.environ["RANK"])


def is_meant(variable: str) -> bool:
    return os.environ.get(variable) in (str(rank()), "all")


def print_line(*parts: object) -> None:
    print(" ".join(map(str, parts)) + "\n", end="", flush=True)


def handle(signum: int, _: object) -> None:
    print_line("rank", rank(), "handles", signum)
    raise SystemExit(0)


def train() -> int:
    if is_meant("SILENT"):
        signal.signal(signal.SIGTERM, handle)
        print_line("rank", rank(), "works as", os.getpid())
        time.sleep(3600)
    if is_meant("STACKS"):
        faulthandler.register(signal.SIGUSR1)
    if begins := os.environ.get("BEGINS"):
        print_line("rank", rank(), "starts as", os.getpid())
        while not os.path.exists(begins):
            if is_meant("FAILS") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise RuntimeError("fails once")
            time.sleep(0.01)
    last = int(os.environ.get("LAST", "1000000"))
    for step in range(1, last + 1):
        if step == 5:
            print_line("rank", rank(), "works as", os.getpid())
        time.sleep(0.001 * (1 + rank()))
        stop = elasticlib.should_stop()
        if stop is not None:
            print_line(
                "rank",
                rank(),
                "stops at",
                step,
                "of",
                os.environ["TORCHELASTIC_RESTART_COUNT"],
                stop.reason,
                stop.ranks,
            )
            while is_meant("STUBBORN"):
                time.sleep(3600)
            return step
    print_line("rank", rank(), "is done")
    return last


if __name__ == "__main__":
    train()
