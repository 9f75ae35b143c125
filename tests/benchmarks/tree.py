"""
The processes of a job, as the kernel lists them.

Rules of this file: everything is read from ``/proc``; a process is named by pid and birth, for pids come again; a
zombie does not count as alive. A process belongs to a job when it descends from the job's launcher or holds the
job's folder in its environment (so one that lost its parent is found too).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from attrs import frozen

from tests.benchmarks.journal import FOLDER

PROC = Path("/proc")
_DEAD = "ZX"


@frozen
class Process:
    """One process that was alive when it was looked at."""

    pid: int
    parent: int
    session: int
    born: int
    """Clock ticks after the machine's start."""


Table = dict[int, Process]


def _look(pid: int) -> Process | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the command's name in brackets and may itself hold blanks and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in _DEAD:
        return None
    return Process(pid, parent=int(fields[1]), session=int(fields[3]), born=int(fields[19]))


def table() -> Table:
    """Every process of this machine that is alive, by pid."""
    seen = (_look(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {each.pid: each for each in seen if each is not None}


def descendants(roots: Iterable[int], processes: Table) -> set[int]:
    """The pids of *roots* that are alive and of all their descendants."""
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: set[int] = set()
    todo = [pid for pid in roots if pid in processes]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


def _environment(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def command(pid: int) -> str:
    """The command line of process *pid*; empty when it is gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def network(pid: int) -> str:
    """The name that the kernel gives the network of process *pid*; empty when it is gone."""
    try:
        return os.readlink(PROC / str(pid) / "ns/net")
    except OSError:
        return ""


def marked(folder: Path, processes: Table) -> set[int]:
    """The pids of processes whose environment names *folder*, or a folder below it, as their job's."""
    mark = f"{FOLDER}={folder}".encode()
    ends = (mark, mark + b"/")
    own = os.getpid()
    found: set[int] = set()
    for pid in processes:
        values = _environment(pid).split(b"\0")
        if pid != own and any(value == ends[0] or value.startswith(ends[1]) for value in values):
            found.add(pid)
    return found


def of_job(launcher: int | None, folder: Path) -> frozenset[Process]:
    """All live processes of the job in *folder*; *launcher* is its launcher's pid as long as that is not reaped."""
    processes = table()
    roots = marked(folder, processes) | ({launcher} if launcher is not None else set())
    pids = descendants(roots, processes)
    return frozenset(processes[pid] for pid in pids)


def still_there(known: Iterable[Process], folder: Path) -> frozenset[Process]:
    """Those of *known*, and all processes marked with *folder* or descended from them, that are alive now."""
    processes = table()
    same = {each.pid for each in known if each.pid in processes and processes[each.pid].born == each.born}
    return frozenset(processes[pid] for pid in descendants(same | marked(folder, processes), processes))


def left_after(limit: float, known: Iterable[Process], folder: Path, spare: Collection[int] = ()) -> frozenset[Process]:
    """
    Wait until no process of the job is left but *spare*; those that are left after *limit* seconds.

    Two looks in a row must find nothing: a process shows no environment for the moment of its exec, and one that
    is forked during a look can be missed by it.
    """
    deadline = time.monotonic() + limit
    known = set(known)
    clean = 0
    while True:
        left = frozenset(each for each in still_there(known, folder) if each.pid not in spare)
        known |= left
        clean = 0 if left else clean + 1
        if clean == 2:
            return frozenset()
        if time.monotonic() > deadline and left:
            return left
        time.sleep(0.02)


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL each of *processes* that is still the one it was."""
    for each in processes:
        now = _look(each.pid)
        if now is not None and now.born == each.born:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def kill_all(known: Iterable[Process], folder: Path, limit: float = 10.0) -> None:
    """Kill everything that is left of a job, also what it starts meanwhile; give up after *limit* seconds."""
    deadline = time.monotonic() + limit
    left = still_there(known, folder)
    while left and time.monotonic() < deadline:
        kill(left)
        left = left_after(0.1, left, folder)


def pss(processes: Iterable[Process]) -> int:
    """Memory of *processes* in bytes; a page that n of the machine's processes share counts 1/n for each."""
    total = 0
    for each in processes:
        try:
            lines = (PROC / str(each.pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024
