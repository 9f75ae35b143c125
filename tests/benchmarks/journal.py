"""
Events in a job's workers, with their times: a file to which every worker appends lines.

Rules of this file: only the standard library, and little of it, because workers import this module
before any measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = "ELASTICLIB_BENCHMARK_FOLDER"
"""The variable that names the job's folder; in a process's environment it also says whose that process is."""
HOLD = "ELASTICLIB_BENCHMARK_HOLD"
"""The variable that names the phase in which workers wait for `AIMED`; without it they never do."""
AIMED = "aimed"
"""The file that says that whoever is to be hit in that phase has been found."""


class Mark(NamedTuple):
    """One line of the journal."""

    what: str
    attempt: int
    rank: int
    at: float
    """Monotonic seconds, taken before the line was written."""


def folder() -> Path:
    """The folder of the job that this worker belongs to."""
    return Path(os.environ[FOLDER])


def attempt() -> int:
    """Return the number of restarts of this worker's job."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank() -> int:
    """This worker's global rank."""
    return int(os.environ["RANK"])


def mark(what: str) -> None:
    """Write down that *what* (one word) happened in this worker now."""
    at = time.monotonic()
    line = f"{what} {attempt()} {rank()} {at!r}\n"
    journal = os.open(folder() / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # One write with O_APPEND: lines of several workers never mix.
    os.write(journal, line.encode())
    os.close(journal)


def hold(phase: str) -> None:
    """Wait in *phase* until the process that is to be hit in it has been found."""
    while os.environ.get(HOLD) == phase and not (folder() / AIMED).exists():
        time.sleep(0.01)


def read(place: Path) -> list[Mark]:
    """All marks that the workers of the job in *place* have made so far, in the order of their writing."""
    try:
        lines = (place / "journal").read_text().splitlines()
    except FileNotFoundError:
        return []
    words = (line.split() for line in lines)
    return [Mark(what, int(turn), int(number), float(at)) for what, turn, number, at in words]


def select(marks: Iterable[Mark], what: str, in_attempt: int = 0) -> dict[int, float]:
    """When each rank first made the mark *what* in one attempt."""
    found: dict[int, float] = {}
    for each in marks:
        if each.what == what and each.attempt == in_attempt:
            found.setdefault(each.rank, each.at)
    return found
