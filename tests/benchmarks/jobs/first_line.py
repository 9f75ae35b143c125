"""Worker function of ``jobs/calls.py``, in its own module: its import costs next to nothing."""

import time


def first_line() -> float:
    """Monotonic seconds at the worker's first line."""
    return time.monotonic()
