"""
A notebook's kernel under a user's hands: cells that are run again, interrupted, and kernels that are killed.

``python -m tests.benchmarks.kernels [--interrupts 100] [--kills 20] [--runs 20] [--seed 0]``. Each interrupt comes at a
random moment of a cell that launches workers which train for ever; then nothing of the launch may be left, the cell
must have ended, and the next cell must work. Each kill ends a kernel that has such a cell under way, by SIGKILL.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
MARK = "ELASTICLIB_KERNEL_CAMPAIGN"
LIMIT = 60.0
"""Seconds that anything may take."""
SETUP = """
import os, time
from elasticlib import LaunchConfig, elastic_launch
config = LaunchConfig(nproc_per_node={workers}, max_restarts=0, start_method={method!r})

def trains(seconds):
    import torch
    weights, until = torch.zeros(64, 64), time.monotonic() + seconds
    print("first line", flush=True)
    while time.monotonic() < until:
        weights = torch.tanh(weights @ weights + 1)
    return float(weights[0, 0])
"""


class Kernel:
    """A kernel of its own, whose descendants are known by a variable."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.warm = 0
        """Processes that stay for the next launch: the reaper, the fork server, and a copy that knows more imports."""
        self._manager = KernelManager(kernel_name="python3")
        env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark}
        env.pop("PYTEST_CURRENT_TEST", None)
        self._manager.start_kernel(env=env)
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT)

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def begin(self, code: str) -> str:
        """Have a cell run; its number."""
        return str(self._client.execute(code))

    def until_idle(self, number: str) -> tuple[str, float]:
        """Wait for the end of cell *number*: the name of its error, and when its first line came (0: never)."""
        error, first = "", 0.0
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            message = self._client.get_iopub_msg(timeout=LIMIT)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and "first line" in content["text"]:
                first = first or time.monotonic()
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return error, first
        raise SystemExit("a cell did not end")

    def run(self, code: str) -> tuple[str, float]:
        """Begin a cell and wait for its end."""
        return self.until_idle(self.begin(code))

    def interrupt(self) -> None:
        """As the stop button does."""
        self._manager.interrupt_kernel()

    def left(self) -> list[str]:
        """What runs of all that it has started, but for what stays for the next launch."""
        found, warm = [], []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != self.pid:
                try:
                    mine = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if mine and command:
                    (warm if _stays(command) else found).append(f"{folder.name} {command[:200]}")
        return found if len(warm) <= self.warm else found + warm

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _stays(command: str) -> bool:
    return "elasticlib" in command and ("_fork_server" in command or "_reaper" in command)


def everything(mark: str) -> list[str]:
    """Processes with this *mark*."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(folder.name)
            except OSError:
                continue
    return found


@contextmanager
def kernel(workers: int, method: str = "forkserver") -> Iterator[Kernel]:
    """A kernel that has run `SETUP`, and launched once."""
    made = Kernel()
    try:
        made.run(SETUP.format(workers=workers, method=method))
        made.run("elastic_launch(config, trains)(0)")
        made.warm = 3
        yield made
    finally:
        made.close()


def gone(left: Any, limit: float = 5.0) -> float:
    """Seconds until *left* finds nothing; raises SystemExit with what it finds."""
    began = time.monotonic()
    while found := left():
        if time.monotonic() - began > limit:
            raise SystemExit(f"left: {found}")
        time.sleep(0.01)
    return time.monotonic() - began


def interrupts(count: int, randoms: random.Random) -> None:
    """Interrupt *count* cells."""
    times, errors = [], set()
    with kernel(4) as made:
        for _ in range(count):
            number = made.begin("elastic_launch(config, trains)(1000)")
            time.sleep(randoms.choice([randoms.uniform(0, 0.1), randoms.uniform(0, 1.0)]))  # the moment is the test
            began = time.monotonic()
            made.interrupt()
            error, _ = made.until_idle(number)
            times.append(time.monotonic() - began)
            errors.add(error)
            gone(made.left)
            if made.run("elastic_launch(config, trains)(0)")[0]:
                raise SystemExit("the cell after an interrupt failed")
    print(
        f"{count} interrupts: nothing left, next cells worked, errors {sorted(errors)}; cell ended after "
        f"{statistics.median(times):.3f} s (median), {max(times):.3f} s (most)"
    )


def kills(count: int, randoms: random.Random) -> None:
    """Kill *count* kernels."""
    times = []
    for _ in range(count):
        made = Kernel()
        made.run(SETUP.format(workers=4, method="forkserver"))
        made.begin("elastic_launch(config, trains)(1000)")
        time.sleep(randoms.uniform(0, 4.0))  # the moment is the test
        made.kill()
        times.append(gone(lambda mark=made.mark: everything(mark)))
        made.close()
    middle, most = statistics.median(times), max(times)
    print(f"{count} kernels killed: nothing left, after {middle:.3f} s (median), {most:.3f} s (most)")


CALLS = {
    "elasticlib": ("forkserver", "elastic_launch(config, changed)()"),
    "elasticlib, spawn": ("spawn", "elastic_launch(config, changed)()"),
    "accelerate": ("forkserver", "debug_launcher(changed, (), num_processes=4)"),
}
"""Start method, and the call: accelerate's notebook launcher as it is without GPUs."""


def runs(count: int) -> None:
    """Seconds from a changed cell's start to its first line, in the notebook."""
    for name, (method, call) in CALLS.items():
        times = []
        with kernel(4, method) as made:
            if name == "accelerate" and made.run("from accelerate import debug_launcher")[0]:
                continue
            for number in range(count if name == "elasticlib" else max(2, count // 5)):
                began = time.monotonic()
                _, first = made.run(f"def changed():\n    print('first line', {number}, flush=True)\n\n{call}")
                times.append(first - began)
        print(
            f"changed cell, 4 workers, {name}: first line after {statistics.median(times[1:]):.3f} s, {len(times)} runs"
        )


def main() -> int:
    """The campaign: 0 when nothing was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels", description=main.__doc__)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    randoms = random.Random(options.seed)
    if options.runs:
        runs(options.runs)
    if options.interrupts:
        interrupts(options.interrupts, randoms)
    if options.kills:
        kills(options.kills, randoms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
