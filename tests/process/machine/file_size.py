"""Data and functions for the tests of a file size limit; the module does not import pytest."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from tests.process import duties

ARGUMENT = "argument " * 5000


def limits() -> tuple[int, int]:
    """Those of the worker."""
    return resource.getrlimit(resource.RLIMIT_FSIZE)


def answer(argument: str) -> tuple[str, list[float]]:
    """The argument again, and more."""
    return argument, [0.5] * 20_000


def talks(argument: str) -> tuple[str, list[float]]:
    """As `answer`, with lines of which the last are noted."""
    print("a line " * 2000, file=sys.stderr)
    return answer(argument)


def is_right(results: Any) -> bool:
    """Return whether both workers returned the right answer."""
    return dict(results) == dict.fromkeys((0, 1), answer(ARGUMENT))


class LargeError(Exception):
    """Has an argument that is larger than a file may be."""

    def __str__(self) -> str:
        return str(self.args[0])


def fails(argument: str) -> None:
    raise LargeError("x" * 50_000, argument)


def _deep(levels: int) -> None:
    if levels:
        _deep(levels - 1)
    else:
        time.sleep(60)  # stands for work; the test ends it


def _works_deep() -> None:
    _deep(60)


def stacks(config: Any) -> bool:
    """Return True once the stacks of two workers arrive, which together exceed the file size limit."""
    from elasticlib import elastic_launch

    job = elastic_launch(config, _works_deep).start()
    duties.wait_until(lambda: len(job.stacks()) == 2 and all("_deep" in text for text in job.stacks().values()))
    job.stop(1.0)
    return True
