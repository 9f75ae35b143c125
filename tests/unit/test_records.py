"""What happened: each record's text and weight, and the sink that logs it."""

from __future__ import annotations

import logging

import pytest

from elasticlib import records
from elasticlib.records import (
    LogsKept,
    NotNeeded,
    Record,
    RoundEnded,
    RoundStarted,
    ThreadsChosen,
    WorkersStopping,
    WorkersSurvived,
)

STARTED = RoundStarted(2, 0, 1, 4, 1, 3, "127.0.0.1:29500", {0: 12, 1: 11}, "all 1 nodes are there")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            STARTED,
            "round 2 started (all 1 nodes are there): node 0 of 1, 2 of 4 workers here, store at 127.0.0.1:29500, "
            "restart 1 of 3, processes [11, 12]",
        ),
        (RoundEnded(2, "rank 1 failed", restart=True), "round 2 ended: rank 1 failed"),
        (
            WorkersStopping(2, "rank 1 failed", 15, 2.5),
            "stopping the workers of round 2 with signal 15, 2.5 s: rank 1 failed",
        ),
        (ThreadsChosen(2, 4.5, 2), "OMP_NUM_THREADS=2 in each worker: 4.5 CPUs for 2 workers"),
        (
            NotNeeded("n2/1-a", "all 2 nodes succeeded in round 0"),
            "node n2/1-a was not needed, so none of its workers has a result: all 2 nodes succeeded in round 0",
        ),
        (LogsKept("/tmp/logs"), "logs and error files are kept in /tmp/logs"),
    ],
)
def test_a_record_tells_its_facts_in_one_line(record: Record, text: str) -> None:
    assert str(record) == text


def test_survivors_are_named_with_what_it_means() -> None:
    text = str(WorkersSurvived((7, 8)))

    assert "[7, 8]" in text
    assert "uninterruptible sleep" in text


@pytest.mark.parametrize(
    ("record", "level"),
    [
        (STARTED, logging.INFO),
        (RoundEnded(0, "", restart=True), logging.WARNING),
        (RoundEnded(0, "", restart=False), logging.INFO),
        (WorkersStopping(0, "", 15, 30.0), logging.INFO),
        (WorkersSurvived((7,)), logging.ERROR),
        (ThreadsChosen(1, 1.0, 1), logging.INFO),
        (LogsKept(""), logging.INFO),
    ],
    ids=str,
)
def test_what_costs_time_or_needs_a_look_is_louder(record: Record, level: int) -> None:
    assert record.level == level


def test_the_log_gets_each_record_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "elasticlib"):
        records.log(RoundEnded(2, "rank 1 failed", restart=True))
        records.log(LogsKept("/tmp/100%s"))

    assert [(entry.name, entry.levelno, entry.getMessage()) for entry in caplog.records] == [
        ("elasticlib", logging.WARNING, "round 2 ended: rank 1 failed"),
        ("elasticlib", logging.INFO, "logs and error files are kept in /tmp/100%s"),
    ]
