"""Anonymous files in memory: what processes share by descriptor, and nobody finds by name."""

from __future__ import annotations

import os


def anonymous_file(name: str) -> int:
    """A new empty file that no folder lists, as a descriptor; *name* shows in ``/proc/PID/fd``. Raises OSError."""
    return os.memfd_create(name)


def sealable_file(name: str) -> int:
    """As `anonymous_file`, one that can be closed to all changes."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
