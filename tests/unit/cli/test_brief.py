"""The two lines that elasticrun writes to a terminal."""

from __future__ import annotations

import io

import pytest

from elasticlib import records
from elasticlib.cli._brief import Brief, outcome_of, size_of
from elasticlib.job import JobStatus


def status(state: str = "succeeded", seconds: float = 12.34, restarts: int = 0) -> JobStatus:
    return JobStatus("train.py", state, "", seconds, restarts, 0, 1)


def started(number: int = 0) -> records.RoundStarted:
    return records.RoundStarted(number, 0, 2, 4, number, 3, "host:1", {0: 10, 1: 11}, "first")


@pytest.mark.parametrize(
    ("nodes", "ranks", "here", "text"),
    [
        (1, 1, 1, "1 node x 1 rank"),
        (2, 16, 8, "2 nodes x 8 ranks"),
        (2, 12, 8, "2 nodes with 12 ranks in all, 8 here"),
    ],
)
def test_the_size_of_a_job(nodes: int, ranks: int, here: int, text: str) -> None:
    assert text == size_of(nodes, ranks, here)


def test_how_a_job_has_ended() -> None:
    assert "succeeded after 12.3 s, 0 restarts" == outcome_of(status())
    assert "failed after 1 h 1 min, 1 restart" == outcome_of(status("failed", 3661.2, 1))


def test_start_is_printed_once_and_the_end_after_it() -> None:
    terminal = io.StringIO()
    brief = Brief("elasticrun", "train.py", terminal)
    for record in (started(0), started(1)):
        brief.sink(record)
    brief.end(status(restarts=1))

    assert [
        "elasticrun: train.py: 2 nodes x 2 ranks",
        "elasticrun: train.py: succeeded after 12.3 s, 1 restart",
    ] == terminal.getvalue().splitlines()


def test_a_job_that_never_started_has_no_lines() -> None:
    terminal = io.StringIO()
    Brief("elasticrun", "train.py", terminal).end(status("failed"))

    assert "" == terminal.getvalue()


def test_brief_raises_nothing_if_the_terminal_is_lost() -> None:
    class LostTerminal(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    brief = Brief("elasticrun", "train.py", LostTerminal())
    brief.sink(started())
    brief.end(status())
