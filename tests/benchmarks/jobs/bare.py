"""A worker that imports next to nothing, waits at the gate and ends."""

from tests.benchmarks import state_log

state_log.mark("up")
with open(state_log.folder() / "gate", "rb"):
    pass
