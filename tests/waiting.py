"""Wait in a test for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], seconds: float = 90.0, what: str | Callable[[], str] = "the condition"
) -> None:
    """Return once *condition* holds. Fail the test after *seconds*, and say that *what* did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            described = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {seconds:g} s in vain for {described}")
        time.sleep(0.005)
