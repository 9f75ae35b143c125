"""Promise 18: rows at a terminal's foot (``--progress``), beside the same job without them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
import threading
from collections.abc import Iterator

from attrs import frozen

from tests.benchmarks.figures import Benchmark, Figure, Turn
from tests.benchmarks.job import BenchmarkError, launched, started
from tests.benchmarks.launchers import Launcher

WORKERS = 4
STEPS, PAUSE = 500, 0.01
FLOOD = 20_000
_TICKS = os.sysconf("SC_CLK_TCK")


@frozen
class Spent:
    """Wall time and CPU time of one job."""

    wall: float
    """Seconds of the whole command."""
    cpu: float
    """Seconds of the launcher's process alone."""


@frozen
class Terminals:
    """A steady job of `STEPS` lines of each worker, and one of `FLOOD` lines as fast as they can."""

    steady: float
    """Seconds of CPU."""
    steady_plain: float
    flood: float
    """Seconds of the whole command."""
    flood_plain: float
    flood_cpu: float


@contextlib.contextmanager
def _terminal() -> Iterator[int]:
    """A terminal of 40 x 120 that is read as fast as it can be."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    reader = threading.Thread(target=_read, args=(master,), daemon=True)
    reader.start()
    try:
        yield slave
    finally:
        os.close(slave)  # its last user: the reader ends
        reader.join(10)
        os.close(master)


def _read(master: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(master, 1 << 16):
            pass


def _spent(launcher: Launcher, options: tuple[str, ...], count: int, pause: float) -> Spent:
    command = launched(launcher, "chatty.py", str(count), str(pause), workers=WORKERS, options=options)
    with _terminal() as terminal, started(command, terminal=terminal, variables={"TERM": "xterm"}) as job:
        handle = os.pidfd_open(job.process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(120_000):
                raise BenchmarkError("the launcher did not end")
        finally:
            os.close(handle)
        # It has ended, and was not waited for yet: what it took is still there to be read.
        with open(f"/proc/{job.process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        ended = job.succeeded()
        return Spent(ended - job.started, (int(fields[11]) + int(fields[12])) / _TICKS)


def measure(launcher: Launcher, turn: Turn) -> Terminals:
    """Run both jobs with rows, where the launcher has such, and without. Raises `BenchmarkError` when one fails."""
    flood = FLOOD // 10 if turn.quick else FLOOD
    steady_plain, flood_plain = (_spent(launcher, (), *job) for job in ((STEPS, PAUSE), (flood, 0.0)))
    if not launcher.rows:
        return Terminals(steady_plain.cpu, steady_plain.cpu, flood_plain.wall, flood_plain.wall, flood_plain.cpu)
    steady, flooded = (_spent(launcher, launcher.rows, *job) for job in ((STEPS, PAUSE), (flood, 0.0)))
    return Terminals(steady.cpu, steady_plain.cpu, flooded.wall, flood_plain.wall, flooded.cpu)


TERMINALS = Benchmark(
    "rows at a terminal's foot",
    measure,
    (
        Figure(18, "CPU of the launcher, 4 workers, 100 steps/s for 5 s, `--progress`", "s", "steady"),
        Figure(18, "the same without it", "s", "steady_plain"),
        Figure(18, "4 workers, 20,000 lines as fast as they can, `--progress`", "s", "flood"),
        Figure(18, "the same without it", "s", "flood_plain"),
        Figure(18, "CPU of the launcher in that flood, `--progress`", "s", "flood_cpu"),
    ),
)
