"""Rank 0 raises while one of its threads works on; the others write down when they are told to stop."""

import signal
import sys
import threading
from types import FrameType

from tests.benchmarks import state_log


def told(signum: int, frame: FrameType | None) -> None:
    """Write down that the stop signal came, and go."""
    state_log.mark("told")
    sys.exit(0)


signal.signal(signal.SIGTERM, told)
state_log.mark("up")
if state_log.rank() == 0:
    threading.Thread(target=threading.Event().wait).start()
    with open(state_log.folder() / "gate", "rb"):
        state_log.mark("raised")
        raise ValueError("bad batch")
while True:
    signal.pause()
