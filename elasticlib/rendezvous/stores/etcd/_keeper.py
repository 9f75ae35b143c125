"""
Runs a command for as long as its caller lives: ``python _keeper.py DESCRIPTOR COMMAND ...``.

Rules of this file: the standard library only, run by its path. The descriptor is the reading end of
a pipe to which only the caller can write. Its end means that the caller is gone, for any reason.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def main(descriptor: int, command: list[str]) -> int:
    """Run the command until it ends or *descriptor* does; return its exit status."""
    libc = ctypes.CDLL(None)

    # At its parent's end SIGCONT wakes a keeper that is stopped; otherwise it could not end the
    # command.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # Only the command has the other end, and closes it by ending.
    ended, lease = os.pipe()
    child = subprocess.Popen(command, preexec_fn=die_with_parent, stdin=subprocess.DEVNULL, pass_fds=(lease,))
    os.close(lease)

    # poll, as select takes no descriptor above 1023.
    poll = select.poll()
    for each in (descriptor, ended):
        poll.register(each, select.POLLIN)
    if ended not in dict(poll.poll()):
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()

    return child.wait()


if __name__ == "__main__":
    sys.exit(abs(main(int(sys.argv[1]), sys.argv[2:])))
