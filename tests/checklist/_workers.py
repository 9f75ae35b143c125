"""
Shared code of worker scripts, and functions that wait for workers and read reports of failures.

Rules of this file: a worker reports by files in the row's folder, which appear whole; nobody waits
for a time.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Mapping

from attrs import field, frozen

from tests.checklist.peers import LIMIT, Peer, free_port

QUICK: Mapping[str, str] = {"PET_PRELOAD": ""}
"""For workers that import no torch: elasticlib then imports none for them either, and no other launcher reads it."""

TOOLS = """
import json, os, signal, sys, time
RANK, RESTART, WORLD = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))

def note(name, text=""):
    with open(f"{name}.{os.getpid()}.part", "w") as file:
        file.write(str(text))
    os.rename(file.name, name)

def wait_for(*names):
    while not all(map(os.path.exists, names)):
        time.sleep(0.01)

def heed(then, *signals):
    "Note each signal that comes by rank and name; ``then`` is called after that."
    def heeded(signum, frame):
        note(f"got{RANK}.{signal.Signals(signum).name}")
        then()
    for signum in signals or (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(signum, heeded)

def ignore():
    pass

def leave_error(message, timestamp=1700000000):
    "What record leaves, written by hand."
    extra = {"py_callstack": f"Traceback (most recent call last):\\n{message}", "timestamp": str(int(timestamp))}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)

def idle():
    note(f"up{RANK}", os.getpid())
    while True:
        signal.pause()
"""
"""The beginning of a worker's script."""


def script(peer: Peer, code: str, name: str = "script.py") -> str:
    """Write a worker's script that begins with `TOOLS`; its name."""
    return peer.script(TOOLS + code, name)


def wait_for_files(peer: Peer, *names: str, limit: float = LIMIT, of: subprocess.Popen[str] | None = None) -> None:
    """Wait for files in the row's folder; an end of the command that should write them is a failure."""

    def there() -> bool:
        return all((peer.folder / name).exists() for name in names)

    found = peer.wait_until(lambda: there() or (of is not None and of.poll() is not None), limit)
    assert found and there(), f"there are {sorted(path.name for path in peer.folder.iterdir())}, not {names}"


def listens(port: int) -> bool:
    """Return whether a process listens at *port*, without a connection to it."""
    text = "".join(pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    return re.search(rf":{port:04X} [0-9A-F:]+ 0A ", text) is not None


NEWCOMERS: Mapping[str, str] = {**QUICK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For jobs that nodes join later: of a store that torch's agents share, the newcomers never learn the address."""


@frozen
class Team:
    """A job of several agents on this machine; the first one hosts the store."""

    peer: Peer
    options: tuple[str, ...]
    """Of all agents, the script included."""
    env: Mapping[str, str] = QUICK
    conf: str = "last_call_timeout=30"
    port: int = field(factory=free_port)

    def node(self, *args: str) -> subprocess.Popen[str]:
        """Start an agent, whose workers get *args*; returns once the job's store is there."""
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job7"]
        more = [f"--rdzv-conf={self.conf}", "--local-addr=127.0.0.1"]
        process = self.peer.start(*place, *more, *self.options, *args, env=self.env)
        self.peer.wait_until(lambda: listens(self.port) or process.poll() is not None, LIMIT)
        return process


def names(peer: Peer, pattern: str) -> list[str]:
    """The files in the row's folder of which the name has that *pattern*."""
    return sorted(path.name for path in peer.folder.glob(pattern))


@frozen
class FailureRecord:
    """One record of a summary."""

    rank: int
    local_rank: int
    exitcode: int
    pid: int
    time: str
    host: str
    error_file: str
    text: str
    """All of it, and so the traceback or message."""


@frozen
class Summary:
    """Summary that a launcher prints of a failed job."""

    title: str
    others: list[FailureRecord]
    root: FailureRecord


_RECORD = re.compile(
    r"^\s*time +: (?P<time>\S+)\n"
    r"\s*host +: (?P<host>\S+)\n"
    r"\s*rank +: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"\s*exitcode +: (?P<exitcode>-?\d+) \(pid: (?P<pid>\d+).*\n"
    r"\s*error_file: (?P<error_file>\S+)\n"
    r"\s*traceback : ",
    re.MULTILINE,
)


def summary(stderr: str) -> Summary:
    """The summary at the end of *stderr*."""
    frame = re.search(r"^={5,}\n(.*?)\n={5,}$", stderr, re.DOTALL | re.MULTILINE)
    assert frame is not None, stderr
    head, mark, root = frame[1].partition("Root Cause (first observed failure):")
    assert mark, stderr
    (only,) = _reported(root)
    return Summary(head.splitlines()[0].strip(), _reported(head), only)


def _reported(text: str) -> list[FailureRecord]:
    found = list(_RECORD.finditer(text))
    ends = [*(each.start() for each in found[1:]), len(text)]
    return [
        FailureRecord(
            *(int(each[name]) for name in ("rank", "local_rank", "exitcode", "pid")),
            *(each[name] for name in ("time", "host", "error_file")),
            text=text[each.start() : end],
        )
        for each, end in zip(found, ends, strict=False)
    ]
