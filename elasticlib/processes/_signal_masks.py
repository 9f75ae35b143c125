"""
The signals that a process handles or ignores, as the kernel knows them.

Rules of this file: a process that is gone, or that this user may not read, handles and ignores none.
"""

from __future__ import annotations

import os
import signal


def has_default_action(signum: int) -> bool:
    """Return True if this program neither handles nor ignores *signum*."""
    # Python knows only its own handlers, and not those that C code has installed, such as `faulthandler.register`.
    return signal.getsignal(signum) is signal.SIG_DFL and not catches(os.getpid(), signum)


def catches(pid: int, signum: int) -> bool:
    """Return True if the program has a handler for *signum*."""
    return _has_signal(pid, b"SigCgt:", signum)


def ignores(pid: int, signum: int) -> bool:
    """Return True if the program ignores *signum*."""
    return _has_signal(pid, b"SigIgn:", signum)


def _has_signal(pid: int, mask: bytes, signum: int) -> bool:
    """Return True if *signum* is in this *mask* of the program."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            value = next((line.split()[1] for line in file if line.startswith(mask)), b"0")
    except OSError:
        return False
    # Bit n - 1 stands for signal n.
    return bool(int(value, 16) >> (signum - 1) & 1)
