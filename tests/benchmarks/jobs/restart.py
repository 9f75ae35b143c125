"""A worker with torch imported; in the first attempt the rank named on the command line kills itself at the gate."""

import os
import signal
import sys

import torch  # noqa: F401  (its import is part of what is timed)

from tests.benchmarks import journal

journal.mark("up")
if journal.attempt() == 0:
    if journal.rank() == int(sys.argv[1]):
        with open(journal.folder() / "gate", "rb"):
            journal.mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
