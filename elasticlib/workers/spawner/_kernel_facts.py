"""
Facts of the kernel about a worker and the processes that it started, read from ``/proc``.

Rules of this file: it sends no signal. A process that is gone, or that this user may not read,
has no facts. It reads no file system but ``/proc``, since a dead server would block the reader.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection

from elasticlib.processes import descendants, is_memory_cleaner, process_facts

_LONGEST_COMMAND = 200
_NOT_ON_DISK = ("/memfd:", "/dev/", "/proc/", "/sys/")


def only_main_thread_runs(pid: int) -> bool:
    """
    Return True if only the first of the program's threads is on a processor, or waits for one.
    """
    return _running_threads(pid) == [pid]


def other_threads_run(pid: int) -> bool:
    """
    Return True if another thread than the program's first is on a processor, or waits for one.

    True as well if that cannot be found out.
    """
    running = _running_threads(pid)
    return running is None or any(thread != pid for thread in running)


def _running_threads(pid: int) -> list[int] | None:
    """Return the threads in state R; None if one ended meanwhile, or this process may not look."""
    running = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                # The name before it, in brackets, may contain brackets and spaces itself.
                state = file.read().rpartition(b")")[2].split()[0]
            if state == b"R":
                running.append(int(thread))
    except OSError:
        return None

    return running


def group(root: int, leader: int) -> list[int]:
    """
    Return the processes of the group that *leader* began, with itself, whose parent is *root* or
    one of the group.

    Zombies are included, because a process whose first thread alone has ended looks like one.
    """
    found: list[int] = []
    parents = [root]
    while parents:
        members = [pid for pid in children(parents.pop()) if _group_of(pid) == leader]
        parents += members
        found += members
    return found


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def children(parent: int) -> list[int]:
    """
    Return the processes that *parent* has started or, as a sub-reaper, adopted; including
    zombies.
    """
    try:
        found: list[int] = []
        # Each thread has a list of its children.
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        # The process is gone, or the kernel has no such lists.
        return [pid for pid, its_parent, _ in descendants(parent) if its_parent == parent]

    return found


def detached(parent: int, sessions: Collection[int]) -> list[int]:
    """
    Return the living children of *parent* that are in none of the *sessions*, nor in its own.

    Torch's manager of shared memory is left out.
    """
    others = {*sessions, os.getsid(parent)}
    apart = [pid for pid in children(parent) if _lives_apart(pid, others)]
    return [pid for pid in apart if not is_memory_cleaner(pid)]


def _lives_apart(pid: int, sessions: Collection[int]) -> bool:
    facts = process_facts(pid)
    if facts is None or facts[0] == b"Z":
        return False
    # The fourth field from the state letter on is the session (proc(5)).
    return int(facts[3]) not in sessions


def command(pid: int) -> str:
    """Return the command line of the process, or its beginning."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_LONGEST_COMMAND).rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return shlex.join(map(os.fsdecode, words))


def written_bytes(pid: int) -> int:
    """Return the number of bytes that the process has written so far, to any file."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            facts = dict(line.split(b": ") for line in file)
    except OSError:
        return 0
    # A mapped file is written without a call: only the second number counts that.
    return int(facts[b"wchar"]) + int(facts[b"write_bytes"])


def has_own_file(pid: int) -> bool:
    """
    Return True if the process has a file of its own open for writing.

    These do not count: stdout and stderr, logs (files that it only appends to), files that this
    process has open as well, and memory files.
    """
    others = {_path(pid, "1"), _path(pid, "2"), *_paths("self").values()}
    for descriptor, path in _paths(pid).items():
        if path in others or not _is_on_disk(path):
            continue
        if _is_written(pid, descriptor):
            return True
    return False


def _paths(pid: int | str) -> dict[str, str]:
    """Return the path of the file behind each descriptor."""
    try:
        return {name: _path(pid, name) for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return {}


def _path(pid: int | str, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


def _is_on_disk(path: str) -> bool:
    if not path.startswith("/"):
        # A pipe or a socket.
        return False
    was_removed = path.endswith(" (deleted)")
    return not path.startswith(_NOT_ON_DISK) and not was_removed


def _is_written(pid: int, descriptor: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
            value = next((line.split()[1] for line in file if line.startswith(b"flags:")), b"0")
    except OSError:
        return False

    flags = int(value, 8)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return False

    # Logs are only appended to, and a file that is open as a path alone cannot be written.
    return not flags & (os.O_APPEND | os.O_PATH)
