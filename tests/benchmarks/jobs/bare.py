"""A worker that imports next to nothing, waits at the gate and ends."""

from tests.benchmarks import journal

journal.mark("up")
with open(journal.folder() / "gate", "rb"):
    pass
