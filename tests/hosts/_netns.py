"""
Machines on one machine: network namespaces joined by a bridge, each with names, resolver and link of its own.

Rules of this file: nothing of it outlives this process. Each machine is held by one process, which kills whatever
runs on the machine, and ends, when we do; the namespaces go with the last process in them. Nothing is written below
``/etc`` or ``/run``. Root and iproute2 are needed; `missing` says what is not there.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from tests.shims import built

SUBNET = "10.77.0"
_ESTABLISHED = "01"
_RESOLVER = "127.0.0.53"

# The machine's one process that is always there: it names the machine, and switches it off when its stdin ends.
_HOLDER = f"""
import contextlib, os, signal, socket, subprocess, sys
name, hosts, resolver, silent = sys.argv[1:]
socket.sethostname(name)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for source, target in ((hosts, "/etc/hosts"), (resolver, "/etc/resolv.conf")):
    subprocess.run(["mount", "--bind", source, os.path.realpath(target)], check=True)
mute = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if silent:
    mute.bind(("{_RESOLVER}", 53))
print(flush=True)
sys.stdin.read()
here, found = os.readlink("/proc/self/ns/net"), True
while found:
    found = False
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.readlink(f"/proc/{{pid}}/ns/net") == here:
                os.kill(pid, signal.SIGKILL)
                found = True
"""


class Dns(enum.Enum):
    """Resolution of a name that is not in the hosts file."""

    NONE = "none"
    """It is refused at once."""
    SILENT = "silent"
    """The name server never answers."""


@frozen
class Host:
    """One machine."""

    name: str
    address: str
    _holder: subprocess.Popen[bytes]
    _switch: int
    """A process in the namespace of the bridge."""
    _port: str
    """The bridge's end of this machine's link."""

    def entered(self, *command: str) -> list[str]:
        """The *command* line as it runs on this machine, in the present folder, with the process that is started."""
        inside = ["nsenter", "-t", str(self._holder.pid), "-n", "-m", "-u", "--"]
        return [*inside, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]

    def popen(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Start *command* on this machine, as `subprocess.Popen` does; the pid is the command's own."""
        return subprocess.Popen(self.entered(*command), **settings)

    def network(self) -> str:
        """The name that the kernel gives its network."""
        return os.readlink(f"/proc/{self._holder.pid}/ns/net")

    def connections(self, port: int) -> int:
        """Return the number of the machine's TCP connections to *port*."""
        rows: list[list[str]] = []
        for table in ("tcp", "tcp6"):
            text = Path(f"/proc/{self._holder.pid}/net/{table}").read_text()
            rows += [line.split() for line in text.splitlines()[1:]]
        return sum(row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == port for row in rows)

    def loopback_bytes(self) -> int:
        """Return the number of bytes that the machine's processes have sent to each other."""
        text = Path(f"/proc/{self._holder.pid}/net/dev").read_text()
        [line] = [line for line in text.splitlines() if line.strip().startswith("lo:")]
        return int(line.partition(":")[2].split()[8])

    def cut(self) -> None:
        """Take the link away: what is sent is lost, and nobody is told."""
        _ip(self._switch, f"link set {self._port} down")

    def heal(self) -> None:
        """Give the link back."""
        _ip(self._switch, f"link set {self._port} up")

    def lose(self) -> None:
        """Lose the machine for good: its link is cut, and all that runs on it is killed."""
        self.cut()
        self._holder.communicate()


def shifted(seconds: float, folder: Path) -> Mapping[str, str]:
    """
    Variables under which a program finds the wall clock, and no other clock, ahead by *seconds*.

    The library that does it is compiled into *folder*, which the program must find for as long as it runs.
    """
    return {**built("shifted_clock", folder), "SHIFTED_CLOCK": str(seconds)}


def missing() -> str:
    """Why there can be no machines here; empty when there can."""
    lacking = [program for program in ("ip", "unshare", "nsenter", "mount", "gcc") if shutil.which(program) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this machine"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def machines(count: int, dns: Dns = Dns.NONE) -> Iterator[tuple[Host, ...]]:
    """
    *count* machines ``m1``, ``m2``, ... at 10.77.0.1, 10.77.0.2, ... that know each other by name.

    In the end all that runs there is killed; who started a process there waits for it.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eh-")))
        names = [f"m{number}" for number in range(1, count + 1)]
        addresses = [f"{SUBNET}.{number}" for number in range(1, count + 1)]
        known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{known}")
        (folder / "resolver").write_text(f"nameserver {_RESOLVER}\n")
        switch, *holders = [stack.enter_context(_running_holder(name, folder, dns)) for name in ("switch", *names)]
        for holder in (switch, *holders):
            _await(holder)
        ports = [f"v{number}" for number in range(1, count + 1)]
        links = [
            f"link add {port} type veth peer name eth0 netns {holder.pid}\nlink set {port} master br0 up"
            for port, holder in zip(ports, holders, strict=True)
        ]
        _ip(switch.pid, "link add br0 type bridge", "link set br0 up", *links)
        for address, holder in zip(addresses, holders, strict=True):
            _ip(holder.pid, f"addr add {address}/24 dev eth0", "link set eth0 up")
        yield tuple(
            Host(name, address, holder, switch.pid, port)
            for name, address, holder, port in zip(names, addresses, holders, ports, strict=True)
        )


@contextmanager
def _running_holder(name: str, folder: Path, dns: Dns) -> Iterator[subprocess.Popen[bytes]]:
    silent = "silent" if dns is Dns.SILENT else ""
    program = [sys.executable, "-I", "-S", "-c", _HOLDER, name, str(folder / "hosts"), str(folder / "resolver"), silent]
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield holder
    finally:
        holder.communicate()


def _await(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdout is not None
    if not holder.stdout.readline():
        raise RuntimeError(f"the process that holds a machine ended with {holder.wait()}")


def _ip(inside: int, *lines: str) -> None:
    batch = "".join(f"{line}\n" for line in lines)
    command = ["nsenter", "-t", str(inside), "-n", "--", "ip", "-batch", "-"]
    done = subprocess.run(command, input=batch, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip failed: {done.stderr.strip()}; it was told:\n{batch}")
