"""A worker with torch imported, which waits at the gate and ends."""

import torch  # noqa: F401  (its import is part of what is timed)

from tests.benchmarks import state_log

state_log.mark("up")
with open(state_log.folder() / "gate", "rb"):
    state_log.mark("end")
