"""
Anonymous files in memory, which processes share by descriptor, and which have no name.

If the kernel has no memfd or refuses it, a file that no folder lists replaces it. That file has
the same size, positions and mappings. It takes room of ``/dev/shm``, or of the folder for
temporary files if that has more.
"""

from __future__ import annotations

import errno
import fcntl
import os

from elasticlib.processes._refusals import Refusal

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_SHARED_MEMORY = "/dev/shm"
_ENOUGH = 1 << 30
"""Free bytes from which ``/dev/shm`` is used: containers have 64 MiB of it by default."""


memfds = Refusal("memfd_create", lambda: os.close(os.memfd_create("probe")))
"""The kernel's refusal of memfds, if it makes none here."""


def anonymous_file(name: str) -> int:
    """
    Return the descriptor of a new empty file that no folder lists. Raises OSError.

    *name* shows in ``/proc/PID/fd``.
    """
    return _unlisted_file() if memfds.why() else os.memfd_create(name)


def sealable_file(name: str) -> int:
    """Return a file like `anonymous_file` that `seal` can close to changes."""
    return _unlisted_file() if memfds.why() else os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> None:
    """Forbid all changes to the file. A substitute for a memfd stays writable."""
    if not memfds.why():
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def _unlisted_file() -> int:
    failure = OSError(errno.ENOENT, "no folder for temporary files is writable: set TMPDIR to a writable folder")
    for folder in _folders():
        try:
            return _unlisted_in(folder)
        except OSError as error:
            failure = error
    raise failure


def _folders() -> list[str]:
    """Return the possible folders, the best first."""
    temporary = [folder for folder in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp") if folder]
    return [_SHARED_MEMORY, *temporary] if _has_room(_SHARED_MEMORY) else [*temporary, _SHARED_MEMORY]


def _has_room(folder: str) -> bool:
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize >= _ENOUGH


def _unlisted_in(folder: str) -> int:
    try:
        # With O_EXCL no process can give the file a name later.
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise

    # A file system without such files: this file is listed for a moment, under a name that cannot
    # be guessed.
    path = os.path.join(folder, f".elasticlib-{os.urandom(16).hex()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return descriptor
