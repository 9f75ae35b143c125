"""
A notebook's kernel, driven as a front end does it: cells are run, read and interrupted; what it leaves is found.

Rules of this file: a kernel's descendants are known by a variable that they inherit, whatever becomes of their parents.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define, field
from jupyter_client.manager import KernelManager

from tests.benchmarks import tree
from tests.benchmarks.job import ROOT

MARK = "ELASTICLIB_KERNEL_CAMPAIGN"
LIMIT = 120.0
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


@define
class Ended:
    """A cell that has ended, as its front end saw it."""

    error: str = ""
    """The name of what it raised."""
    message: str = ""
    texts: list[tuple[float, str]] = field(factory=list)
    """Pieces of the cell's output, each with the moment of its arrival."""

    @property
    def text(self) -> str:
        """All that it wrote."""
        return "".join(text for _, text in self.texts)

    def first(self, part: str) -> float:
        """When the first text with *part* came; 0 where none did."""
        return next((at for at, text in self.texts if part in text), 0.0)

    def ok(self) -> Ended:
        """Itself. Raises SystemExit where it has raised."""
        if self.error:
            raise SystemExit(f"a cell has raised {self.error}: {self.message[-2000:]}")
        return self


class Kernel:
    """A kernel of its own, whose descendants are known by a variable."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.warm = 0
        """Processes that stay for the next launch: the reaper, the fork server, and a copy that knows more imports."""
        self._manager = KernelManager(kernel_name="python3")
        env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark}
        env.pop("PYTEST_CURRENT_TEST", None)
        # A kernel repeats what its children write; some other warnings are nobody's, too.
        self._manager.start_kernel(env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT)

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def begin(self, code: str) -> str:
        """Start a cell; return its number."""
        return str(self._client.execute(code))

    def until_begun(self, number: str) -> None:
        """Wait until cell *number* runs: a kernel ignores an interrupt that comes before."""
        while True:
            message = self._client.get_iopub_msg(timeout=LIMIT)
            if message["msg_type"] == "execute_input" and message["parent_header"].get("msg_id") == number:
                return

    def until_idle(self, number: str, limit: float = LIMIT) -> Ended:
        """Wait for the end of cell *number*. Raises SystemExit where it has none within *limit* seconds."""
        found = Ended()
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=left)
            except queue.Empty:
                break
            at = time.monotonic()
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                found.texts.append((at, content["text"]))
            elif kind == "error":
                found.error, found.message = content["ename"], content["evalue"]
            elif kind == "status" and content["execution_state"] == "idle":
                return found
        raise SystemExit(
            f"a cell did not end; processes: {sorted(self.started().items())}; it wrote {found.text[-2000:]!r}"
        )

    def run(self, code: str, limit: float = LIMIT) -> Ended:
        """Begin a cell and wait for its end."""
        return self.until_idle(self.begin(code), limit)

    def interrupt(self) -> None:
        """As the stop button does."""
        self._manager.interrupt_kernel()

    def started(self) -> dict[int, str]:
        """All that it has started and that runs: the command line of each process."""
        commands = {pid: tree.command(pid) for pid in everything(self.mark) if pid != self.pid}
        return {pid: command for pid, command in commands.items() if command}

    def left(self) -> list[str]:
        """Return the started processes that still run, except those kept for the next launch."""
        found, warm = [], []
        for pid, command in self.started().items():
            (warm if stays(command) else found).append(f"{pid} {command[:200]}")
        return found if len(warm) <= self.warm else found + warm

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def stays(command: str) -> bool:
    """Return whether *command* belongs to a process that is kept for the next launch."""
    return "elasticlib" in command and ("_fork_server" in command or "_reaper" in command)


def everything(mark: str) -> list[int]:
    """The processes of the kernel with *mark*."""
    found = []
    for folder in tree.PROC.iterdir():
        if folder.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@contextmanager
def kernel(workers: int, method: str = "forkserver") -> Iterator[Kernel]:
    """A kernel that has run `SETUP`, and launched once."""
    made = Kernel()
    try:
        made.run(SETUP.format(workers=workers, method=method)).ok()
        made.run("elastic_launch(config, trains)(0)").ok()
        made.warm = 3
        yield made
    finally:
        made.close()
