"""
A worker that writes down that it works, and whom it found at work in another round; it imports no torch.

Each worker holds a lock in its round's file, which the kernel takes away when the process ends, however it does.
Who starts looks at the locks of all other rounds: so no two rounds can be at work at once without one of them seeing
it. With the argument ``stubborn`` it does not heed SIGTERM. It ends well once the job's folder holds ``finish``.
"""

import contextlib
import fcntl
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["ELASTICLIB_BENCHMARK_FOLDER"])
ROUND = "-".join(
    os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
)
_FLOCK = "hhqqi"


def note(what: str, **more: object) -> None:
    """Append a line to the journal."""
    line = {
        "what": what,
        "at": time.monotonic(),
        "round": ROUND,
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        **more,
    }
    journal = os.open(FOLDER / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(journal, json.dumps(line).encode() + b"\n")
    os.close(journal)


def at_work_in(path: Path) -> int:
    """The pid of a process that holds a lock in *path*, 0 if there is none; one that is stopped does not work."""
    with open(path, "rb") as file:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    if kind == fcntl.F_UNLCK:
        return 0
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return 0 if state in (b"T", b"Z", b"X") else int(pid)
    return 0


def stop(signum: int, frame: FrameType | None) -> None:
    """Say that the end was ordered, and end by the same signal."""
    note("told")
    if "stubborn" not in sys.argv:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def main() -> None:
    """Work until told otherwise."""
    signal.signal(signal.SIGTERM, stop)
    own = FOLDER / f"round-{ROUND}"
    with open(own, "a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)
        for other in FOLDER.glob("round-*"):
            if other != own and (pid := at_work_in(other)):
                note("beside", other=other.name, other_pid=pid)
        note("up")
        while not (FOLDER / "finish").exists():
            time.sleep(0.02)  # stands for work
        note("done")


if __name__ == "__main__":
    main()
