"""
Cleanup of temporary log folders of failed launches: the newest stay, the oldest are removed first.

Rules of this file: a folder is removed only under three conditions. Its mark shows that elasticlib made
it, no file in it is younger than a day, and the program that made it has certainly ended. In case of
doubt, or if it cannot be deleted, it stays. Only `remove_if_empty` raises errors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from json import dump, loads
from typing import Any

from elasticlib._clock import monotonic, wall_time
from elasticlib.logs._layout import TEMPORARY_BASE
from elasticlib.utils import stat_words

MARK = ".elasticlib"
"""Name of the file in each folder that identifies the program that made it."""
KEPT = 50
"""Number of folders that stay at any age."""
YOUNGEST = 86400.0
"""Seconds in which a user may still want to read about a failure."""
_LONGEST_MARK = 4096
_BOOT = "/proc/sys/kernel/random/boot_id"
_INTERVAL = 3600.0
_looked: dict[str, float] = {}
"""By folder, the time of this program's last cleanup, in monotonic seconds."""


def make_marked_folder() -> str:
    """Make a temporary folder with a mark, and return its path. Raises OSError."""
    folder = tempfile.mkdtemp(prefix=TEMPORARY_BASE)
    mark(folder)
    return folder


def mark(folder: str) -> None:
    """Mark *folder* as made by this program; a folder that cannot be marked is never removed."""
    # Marked again for each round; the first mark stays.
    with contextlib.suppress(OSError):
        handle = os.open(os.path.join(folder, MARK), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            dump({"v": 1, **_program(os.getpid())}, file)


def remove_if_empty(folder: str) -> None:
    """Delete *folder* if it holds nothing but its mark. Raises OSError if it stays."""
    if os.listdir(folder) == [MARK]:
        os.unlink(os.path.join(folder, MARK))
    os.rmdir(folder)


def holds_something(folder: str) -> bool:
    """Return True if a file in *folder* is not empty, or if a file or folder in it cannot be read."""
    try:
        files = (os.path.join(place, name) for place, _, names in os.walk(folder, onerror=_refuse) for name in names)
        mark = os.path.join(folder, MARK)
        return any(os.lstat(path).st_size for path in files if path != mark)
    except FileNotFoundError as error:
        # A folder that no longer exists holds nothing.
        return bool(error.filename != folder)
    except OSError:
        return True


def keep_marked_folder(folder: str) -> None:
    """Note that *folder* stays: clean up old ones beside it, at most once an hour per program."""
    parent, now = os.path.dirname(folder), monotonic()
    if now >= _looked.get(parent, -_INTERVAL) + _INTERVAL:
        _looked[parent] = now
        sweep(parent)


def sweep(parent: str) -> None:
    """Delete the oldest of this user's marked folders in *parent*, until `KEPT` are left."""
    marked = _marked_folders(parent)
    surplus = len(marked) - KEPT
    for marked_at, path in sorted(marked):
        # A folder is at least as young as its mark, and all that follow have younger marks. To search
        # thousands of them takes a minute, which would delay the end of a launch.
        is_too_young = wall_time() - marked_at < YOUNGEST
        if surplus <= 0 or is_too_young:
            break
        if _has_ended(path) and wall_time() - _last_change(path) >= YOUNGEST:
            shutil.rmtree(path, ignore_errors=True)
            surplus -= 1


def _marked_folders(parent: str) -> list[tuple[float, str]]:
    """Return (time of the mark, path) of each of this user's marked folders in *parent*."""
    named: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        named = [entry.path for entry in entries if entry.name.startswith(TEMPORARY_BASE)]
    marked = []
    for path in named:
        with contextlib.suppress(OSError):
            folder, mark = os.lstat(path), os.lstat(os.path.join(path, MARK))
            # Other users may put folders and links with such names into a folder for temporary files.
            is_own = {folder.st_uid, mark.st_uid} == {os.geteuid()}
            if is_own and stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(mark.st_mode):
                marked.append((mark.st_mtime, path))

    return marked


def _last_change(folder: str) -> float:
    """Return the time of the last change in *folder*, in Unix seconds; the present time if unknown."""
    try:
        walk = os.walk(folder, onerror=_refuse)
        # The folder itself counts, too: it changes when a file in it is made or removed.
        return max(os.lstat(os.path.join(place, name)).st_mtime for place, _, names in walk for name in (".", *names))
    except (OSError, ValueError):
        return wall_time()


def _refuse(error: OSError) -> None:
    raise error


def _has_ended(folder: str) -> bool:
    """Return True if the program that made *folder* has certainly ended."""
    try:
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            made = loads(file.read(_LONGEST_MARK))
        return _is_gone(dict(made))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _is_gone(program: dict[str, Any]) -> bool:
    """Return True if the *program* of a mark has certainly ended. Raises for a damaged mark."""
    ours = _program(os.getpid())
    if program.get("v") != 1:
        # A mark of another version.
        return False
    if program.get("host") != ours["host"]:
        # Machines may share the folder: this one cannot see the process.
        return False
    if program["boot"] != ours["boot"]:
        # A restart of the machine ended it; a boot that is not known proves nothing.
        return bool(program["boot"] and ours["boot"])
    if program["namespace"] != ours["namespace"]:
        # A container's processes cannot be seen from here.
        return False

    pid = program["pid"]
    if type(pid) is not int:
        return False

    # Another process may have this number by now.
    now = _program(pid)
    return bool(now["started"] != program["started"])


def _program(pid: int) -> dict[str, Any]:
    """Return facts that identify a process across machines and boots."""
    # The 20th word is the start time. A zombie has ended, though its number is still taken.
    facts = stat_words(pid)
    return {
        "pid": pid,
        "started": facts[19] if len(facts) > 19 and facts[0] not in "ZX" else "",
        "namespace": _namespace(),
        "boot": _boot(),
        "host": os.uname().nodename,
    }


def _boot() -> str:
    with contextlib.suppress(OSError), open(_BOOT, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
