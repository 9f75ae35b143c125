"""A worker with torch imported; in the first attempt the rank named on the command line kills itself at the gate."""

import os
import signal
import sys

import torch  # noqa: F401  (its import is part of what is timed)

from tests.benchmarks import state_log

state_log.mark("up")
if state_log.attempt() == 0:
    if state_log.rank() == int(sys.argv[1]):
        with open(state_log.folder() / "gate", "rb"):
            state_log.mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
