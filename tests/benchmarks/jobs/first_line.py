"""What the workers of ``jobs/calls.py`` run: in a module of its own, so that importing it costs next to nothing."""

import time


def first_line() -> float:
    """Monotonic seconds at the worker's first line."""
    return time.monotonic()
