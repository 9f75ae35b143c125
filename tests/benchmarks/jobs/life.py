"""A worker with torch imported, which waits at the gate and ends."""

import torch  # noqa: F401  (its import is part of what is timed)

from tests.benchmarks import journal

journal.mark("up")
with open(journal.folder() / "gate", "rb"):
    journal.mark("end")
