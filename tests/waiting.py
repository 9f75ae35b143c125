"""Wait in a test for another process or thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


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


def together(count: int, call: Callable[[int], Any], seconds: float = 60.0) -> list[Any]:
    """Return the result or exception of *call* in each of *count* threads, which get their numbers."""
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        try:
            results[number] = call(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return results
