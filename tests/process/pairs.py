"""Two nodes of one job whose workers write down that they were started, and work until they are told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from elasticlib.processes import _reaper
from tests.process.launches import free_port
from tests.waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "started.py"
HEARTBEAT = 3.0
LIMIT = 60.0


class Machine:
    """A launcher with all its processes, for one worker, in a job of one or two nodes."""

    def __init__(self, folder: Path, port: int, name: str, environment: Mapping[str, str] | None = None) -> None:
        conf = f"heartbeat_timeout={HEARTBEAT:g},last_call_timeout=1"
        command = [sys.executable, "-m", "elasticlib.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--preload", ""]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "pair"]
        command += ["--rdzv-conf", conf, str(SCRIPT), str(folder)]
        self.log = open(folder / f"log of {name}", "w")
        self.launcher = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stderr=self.log)

    def processes(self) -> list[int]:
        """All of them, workers too."""
        return [self.launcher.pid, *(pid for pid, _, _ in _reaper.descendants(self.launcher.pid))]

    def part(self, name: str, worker: int) -> int:
        """The process that is called so, of those that see to *worker*."""
        if name == "launcher":
            return self.launcher.pid
        if name == "spawner":
            facts = _reaper.process_facts(worker)
            assert facts is not None
            return int(facts[1])
        [pid] = [pid for pid in self.processes() if b"rendezvous.sidecar._bridge" in _command(pid)]
        return pid

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self.log.close()


Launcher = TypeVar("Launcher", bound=Machine)


def begin(host: Machine, port: int) -> None:
    """Wait until *host* serves the job's store."""

    def is_listening() -> bool:
        assert host.launcher.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_listening, LIMIT)


@contextlib.contextmanager
def two(make: Callable[[int, str], Launcher]) -> Iterator[tuple[Launcher, Launcher]]:
    """Two nodes of one job, which *make* starts by a port and a name; the first hosts its store."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(contextlib.closing(make(port, "host")))
        begin(host, port)
        yield host, stack.enter_context(contextlib.closing(make(port, "other")))


def starts(folder: Path) -> list[tuple[int, int, int]]:
    """Rank, world size and pid of each worker that was started."""
    try:
        lines = (folder / "starts").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]  # type: ignore[misc]


def of_world(folder: Path, size: int) -> list[int]:
    """Pids of the workers that were started in a world of that size."""
    return [pid for _, world, pid in starts(folder) if world == size]


def send(signum: int, pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signum)


def stop(pids: Iterable[int]) -> None:
    send(signal.SIGSTOP, pids)


def go_on(pids: Iterable[int]) -> None:
    send(signal.SIGCONT, pids)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended since it was listed
