"""
A worker that shares memory by name, with Python's means and in a DataLoader; its end is the first argument.

The names are noted in the second argument, a folder, before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import torch
from torch.utils.data import DataLoader

how, folder = sys.argv[1], Path(sys.argv[2])
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def note(*names: str) -> None:
    """Note these names, in one step."""
    file = folder / f"{attempt}.{rank}.names"
    file.with_suffix(".part").write_text("\n".join(names))
    file.with_suffix(".part").rename(file)


def others_ready() -> bool:
    """Return whether each rank of this attempt has noted its names."""
    return len(list(folder.glob(f"{attempt}.*.names"))) == int(os.environ["WORLD_SIZE"])


torch.multiprocessing.set_sharing_strategy("file_system")
plain = shared_memory.SharedMemory(create=True, size=1000)
batches = iter(DataLoader([torch.ones(100)] * 8, num_workers=1, persistent_workers=True))
batch = next(batches)
children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
shared = [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in children))]
assert shared, "torch shares its memory by other names now"
if how == "detaches" and os.fork() == 0:
    os.setsid()
    note(plain.name.lstrip("/"), str(os.getpid()))
    while not (folder / "end").exists():
        time.sleep(0.01)
    os._exit(0)
if how != "detaches":
    note(plain.name.lstrip("/"), *shared)
if how == "peer fails" and rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not others_ready():
    time.sleep(0.01)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "peer fails" and rank == "0":
    raise ValueError("the reason")
if how != "detaches":
    time.sleep(1000)
