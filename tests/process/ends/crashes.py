"""
Ways for a worker to end: each a function, and with the name as argument a script.

Rank 1 does it; the others wait until they are stopped, so that there is one cause.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any


def is_the_one() -> bool:
    if os.environ["RANK"] == "1":
        return True
    time.sleep(60)  # stands for work; the stop ladder ends it
    return False


def raises() -> None:
    if is_the_one():
        raise ValueError("a bad value")


def raises_own_class() -> None:
    class OddError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")  # so that it cannot be rebuilt from its args

    if is_the_one():
        raise OddError(1, 2)


def exits_with_status() -> None:
    if is_the_one():
        sys.exit(3)


def exits_with_text() -> None:
    if is_the_one():
        sys.exit("the reason")


def ends_at_once() -> None:
    if is_the_one():
        os._exit(4)


def crashes() -> None:
    if is_the_one():
        ctypes.string_at(0)


def aborts() -> None:
    if is_the_one():
        os.abort()


def is_killed() -> None:
    if is_the_one():
        os.kill(os.getpid(), signal.SIGKILL)


def is_terminated() -> None:
    if is_the_one():
        os.kill(os.getpid(), signal.SIGTERM)


def interrupts_itself() -> None:
    if is_the_one():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def misses_a_module() -> None:
    if is_the_one():
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401


def fails_while_a_grandchild_holds_the_output() -> None:
    if is_the_one():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        raise ValueError("a bad value")


def fails_beside_one_that_ignores_the_signal() -> None:
    """Rank 0 ignores SIGTERM, and says so, before rank 1 fails."""
    ready = os.environ["CRASH_READY"]
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(ready, "w"):
            pass
        time.sleep(60)
    while not os.path.exists(ready):
        time.sleep(0.005)
    raise ValueError("a bad value")


class DiesBeforeTheFirstLine:
    """An argument that cannot be rebuilt in the worker."""

    def __reduce__(self) -> Any:
        return _cannot_rebuild, ()


def _cannot_rebuild() -> None:
    raise ValueError("a bad value")


def takes(argument: object) -> None:
    """Never reached when *argument* cannot be rebuilt."""


if __name__ == "__main__":
    globals()[sys.argv[1]]()
