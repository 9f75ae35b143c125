"""Folders that somebody has removed, such as a cleaner of temporary files: made anew, or missed by name."""

from __future__ import annotations

import os
import stat

from elasticlib.errors import EntrypointError


def make_private(path: str) -> None:
    """Make the folder *path*, and those above it that are missing, for this user alone; what is there stays."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if above != path:
        make_private(above)
    try:
        os.mkdir(path, 0o700)  # makedirs would give those above whatever mode the umask leaves
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def is_own(path: str) -> bool:
    """Whether *path* is a folder of this user's, and no link to one."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def may_write_in(folder: str) -> bool:
    """Whether this process may make files in *folder*."""
    # Asked by effective ids only where they differ: old seccomp profiles answer that call (faccessat2) with EPERM.
    has_other_ids = (os.getuid(), os.getgid()) != (os.geteuid(), os.getegid())
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=has_other_ids and os.access in os.supports_effective_ids)


def current() -> str:
    """The folder where this program is, and its workers are to be. Raises `EntrypointError` where that was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        gone = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        raise EntrypointError(
            f"the current folder was removed: {gone}; change to one that is there (os.chdir, cd), or make it anew and "
            "change to it"
        ) from error


def time_of_change(path: str) -> int:
    """Return when the file at *path*, or the archive that it is in, was changed, in ns; 0 where there is none."""
    while path:
        try:
            return os.stat(path).st_mtime_ns
        except NotADirectoryError:
            path = os.path.dirname(path)
        except OSError:
            break
    return 0
