"""A machine that sleeps, as a laptop or a paused virtual machine does: its clock stands still with it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.workers import _guardian
from tests.process import duties

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

SCRIPT = Path(__file__).parent / "scripts" / "started.py"
HEARTBEAT = 3.0
LIMIT = 60.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with which a clock can be made to stand still."""
    library = tmp_path_factory.mktemp("shim") / "still_clock.so"
    source = Path(__file__).with_name("still_clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(source), "-ldl"], check=True)
    return library


class Machine:
    """A launcher with all its processes, on a clock of their own."""

    def __init__(self, shim: Path, folder: Path, endpoint: str, name: str) -> None:
        self._clock = folder / f"clock of {name}"
        self._clock.write_bytes(struct.pack("q", 0))
        conf = f"heartbeat_timeout={HEARTBEAT:g},last_call_timeout=1"
        command = [sys.executable, "-m", "elasticlib.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--preload", ""]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "sleep", "--rdzv-conf", conf]
        env = {**os.environ, "LD_PRELOAD": str(shim), "STILL_CLOCK": str(self._clock)}
        self.log = open(folder / f"log of {name}", "w")
        self.launcher = subprocess.Popen([*command, str(SCRIPT), str(folder)], env=env, stderr=self.log)

    def sleep(self) -> None:
        """Every process stands still."""
        self._asleep = [self.launcher.pid, *(pid for pid, _, _ in _guardian.family(self.launcher.pid))]
        self._since = time.monotonic_ns()
        self._all(signal.SIGSTOP)

    def wake(self) -> None:
        """All go on, and know nothing of the time that went by."""
        self._clock.write_bytes(struct.pack("q", time.monotonic_ns() - self._since))
        self._all(signal.SIGCONT)

    def _all(self, signum: int) -> None:
        for pid in self._asleep:
            os.kill(pid, signum)

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self.log.close()


@pytest.fixture
def pair(shim: Path, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two nodes of one job; the first hosts its store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    host = Machine(shim, tmp_path, endpoint, "host")
    duties.wait_for(lambda: is_listening(endpoint), LIMIT)
    other = Machine(shim, tmp_path, endpoint, "other")
    yield host, other
    for machine in (host, other):
        machine.close()


def is_listening(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def starts(folder: Path) -> list[tuple[int, int, int]]:
    """Rank, world size and pid of each worker that was started."""
    try:
        lines = (folder / "starts").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]  # type: ignore[misc]


def test_a_machine_that_slept_stops_its_workers_and_takes_part_again(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """By its own clock nothing has happened; without a look at the others' time it would work on for ever."""
    host, other = pair

    def worlds(size: int) -> list[int]:
        return [pid for _, world, pid in starts(tmp_path) if world == size]

    duties.wait_for(lambda: len(worlds(2)) >= 2, LIMIT)
    worker = next(pid for rank, world, pid in starts(tmp_path) if (rank, world) == (1, 2))
    alone = len(worlds(1))
    other.sleep()
    duties.wait_for(lambda: len(worlds(1)) > alone, LIMIT)
    together = len(worlds(2))
    other.wake()

    duties.wait_for(lambda: not Path(f"/proc/{worker}").exists(), LIMIT)
    duties.wait_for(lambda: len(worlds(2)) >= together + 2, LIMIT)
    (tmp_path / "go").touch()

    assert [0, 0] == [host.launcher.wait(LIMIT), other.launcher.wait(LIMIT)]
