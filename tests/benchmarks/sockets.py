"""Promise 13: sockets of a one-node job that the network could reach."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import launched, started
from tests.benchmarks.launchers import Launcher

_LISTENING = "0A"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@frozen
class Listener:
    """A TCP socket that takes connections."""

    address: str
    port: int
    inode: int
    loopback: bool


@frozen
class Sockets:
    """The listening sockets of one job."""

    listeners: tuple[Listener, ...]

    @property
    def exposed(self) -> int:
        """Return the number of sockets that listen beyond loopback."""
        return sum(not each.loopback for each in self.listeners)

    @property
    def private(self) -> int:
        """Return the number of sockets that listen on loopback only."""
        return sum(each.loopback for each in self.listeners)


def _address(text: str) -> Address:
    # The kernel prints each 32-bit word of the address in the byte order of the machine (little-endian here).
    words = (bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def parse(lines: Iterable[str]) -> Iterator[Listener]:
    """The listening sockets in the lines of ``/proc/net/tcp`` or ``tcp6``, without their heading."""
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTENING:
            host, port = fields[1].split(":")
            address = _address(host)
            yield Listener(str(address), int(port, 16), int(fields[9]), address.is_loopback)


def _inodes(processes: Iterable[tree.Process]) -> set[int]:
    found: set[int] = set()
    for each in processes:
        folder = tree.PROC / str(each.pid) / "fd"
        try:
            handles = os.listdir(folder)
        except OSError:
            continue
        for handle in handles:
            try:
                target = os.readlink(folder / handle)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[len("socket:[") : -1]))
    return found


def listening(processes: Iterable[tree.Process]) -> tuple[Listener, ...]:
    """Every listening TCP socket that one of *processes* holds, once."""
    inodes = _inodes(processes)
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        path = tree.PROC / "net" / name
        if path.exists():
            found.extend(each for each in parse(path.read_text().splitlines()[1:]) if each.inode in inodes)
    return tuple(found)


def measure(launcher: Launcher, turn: Turn, workers: int = 2) -> Sockets:
    """Look at a job whose gloo process group works. Raises `BenchmarkError` when it does not come up."""
    with started(launched(launcher, "sockets.py", workers=workers)) as job:
        job.when("up", workers)
        found = listening(tree.of_job(job.process.pid, job.folder))
        with job.opened():
            job.succeeded()
        return Sockets(found)


SOCKETS = Benchmark(
    "sockets",
    measure,
    (
        Figure(13, "sockets that listen beyond loopback", "", "exposed", (Goal(0),), fold=max),
        Figure(13, "sockets that listen on loopback", "", "private", fold=max),
    ),
)
