"""Rank 0 raises while one of its threads works on; the others write down when they are told to stop."""

import signal
import sys
import threading
from types import FrameType

from tests.benchmarks import journal


def handle(signum: int, frame: FrameType | None) -> None:
    """Write down that the stop signal came, and go."""
    journal.mark("notified")
    sys.exit(0)


signal.signal(signal.SIGTERM, handle)
journal.mark("up")
if journal.rank() == 0:
    threading.Thread(target=threading.Event().wait).start()
    with open(journal.folder() / "gate", "rb"):
        journal.mark("raised")
        raise ValueError("bad batch")
while True:
    signal.pause()
