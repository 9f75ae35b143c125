"""
Folders: making private and temporary ones, and the current folder, which may have been removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from elasticlib.errors import ConfigError, EntrypointError

_SHARED_MEMORY = "/dev/shm"
_CURRENT = "/proc/self/cwd"


def make_private_folder(path: str) -> None:
    """
    Make the folder *path* and its missing parents, for this user alone; existing ones stay
    unchanged.
    """
    if os.path.isdir(path):
        return

    above = os.path.dirname(path)
    if above != path:
        make_private_folder(above)
    try:
        # os.makedirs would make the parents with the mode that the umask leaves.
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def is_own_folder(path: str) -> bool:
    """Return True if *path* is a folder of this user, and not a link to one."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def may_write_in(folder: str) -> bool:
    """Return True if this process may make files in *folder*."""
    return _may(folder, os.W_OK | os.X_OK)


def _may(path: str, mode: int) -> bool:
    # The call for effective ids (faccessat2) is made only if they differ: old seccomp profiles
    # answer it with EPERM.
    has_other_ids = (os.getuid(), os.getgid()) != (os.geteuid(), os.getegid())
    return os.access(path, mode, effective_ids=has_other_ids and os.access in os.supports_effective_ids)


def make_temporary_folder(purpose: str, longest: int = 0) -> str:
    """
    Make a folder for this user alone, for pipes and sockets, whose path has at most *longest*
    bytes (0: any number).

    In a read-only container it is in ``/dev/shm``. Raises `ConfigError`, which names the
    *purpose*.
    """
    # Imported here: workers import this module, and few of them need tempfile.
    import tempfile

    failure: OSError | None = None

    # None stands for TMPDIR, whose path may be too long for a socket.
    for parent in (None, "/tmp", _SHARED_MEMORY):
        try:
            made = tempfile.mkdtemp(prefix="elasticlib_", dir=parent)
        except OSError as error:
            # The first failure is that of the folder which the user can choose.
            failure = failure or error
            continue
        if not longest or len(os.fsencode(made)) <= longest:
            return made
        os.rmdir(made)

    raise ConfigError(
        f"a folder for {purpose} cannot be created: {failure}; set TMPDIR to a writable folder"
    ) from failure


def current_folder() -> str:
    """
    Return the path of the current folder, in which the workers start too.

    Raises `EntrypointError` if it was removed.
    """
    if path := path_of_current_folder():
        return path
    raise EntrypointError(
        f"the working directory {name_of_current_folder()} no longer exists: change to another one "
        "(os.chdir, cd), or create it again"
    )


def path_of_current_folder() -> str:
    """Return the path of the current folder; ``""`` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def absolute_path(path: str) -> str:
    """
    Return *path* as an absolute one, like Python's ``__file__`` of a script.

    `os.path.abspath` also removes ``folder/..``, which names another file if the folder is a
    link.
    """
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def folder_of_script(path: str) -> str:
    """Return the folder that Python puts first on the search path of the script at *path*: links are followed."""
    return os.path.dirname(os.path.realpath(path))


def absolute_path_without_parents(path: str) -> str:
    """
    Return *path* as an absolute one without ``..`` that names the same folder.

    Links stay in the path where they can.
    """
    plain = os.path.abspath(path)
    real = os.path.realpath(path)
    return plain if os.path.realpath(plain) == real else real


def name_of_current_folder() -> str:
    """Return the name of the current folder for messages; it may have been removed."""
    return os.readlink(_CURRENT).removesuffix(" (deleted)")


def identity_of_current_folder() -> tuple[int, int]:
    """Return the device and inode of the current folder, even if it may not be entered."""
    found = os.stat(_CURRENT)
    return found.st_dev, found.st_ino


def current_folder_can_be_entered() -> bool:
    """Return True if another process can change to the current folder by its path."""
    path = path_of_current_folder()
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity_of_current_folder() and _may(path, os.X_OK)


def enter_folder(folder: str, known_as: Sequence[int]) -> None:
    """
    Change to *folder*, whose `identity_of_current_folder` is *known_as*. Raises OSError if that
    fails.

    A process that was forked in that folder stays there, even if it was removed or may not be
    entered.
    """
    try:
        os.chdir(folder)
    except OSError:
        if identity_of_current_folder() != tuple(known_as):
            raise


@contextlib.contextmanager
def out_of_removed_folder() -> Iterator[None]:
    """
    Change to the root folder within the block if the current one was removed.

    Libraries such as MKL end the process in a removed folder.
    """
    if path_of_current_folder():
        yield
        return

    try:
        # A folder that was removed has no path: only a descriptor leads back.
        former = os.open(".", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # The folder may not be entered either, so there would be no way back.
        yield
        return

    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(former)
        os.close(former)


def time_of_change(path: str) -> int:
    """
    Return the time of change (ns) of the file at *path*, or of the archive that contains it; 0 if
    neither exists.
    """
    while path:
        try:
            return os.stat(path).st_mtime_ns
        except NotADirectoryError:
            # A part of the path is a file, such as an archive on the search path.
            path = os.path.dirname(path)
        except OSError:
            break
    return 0
