"""Status of a job for people: the contents of its records, as a table, and equal stacks once."""

from __future__ import annotations

import pytest
from IPython.lib.pretty import pretty

from elasticlib import records
from elasticlib.job._status import JobCourse, JobStatus, RankStatus, Stacks


def received(number: int = 0, restarts: int = 0) -> records.RanksReceived:
    return records.RanksReceived(number, 1, 2, 4, restarts, "host:29400", "all nodes are there", 0.1)


def started(number: int = 0) -> records.RoundStarted:
    return records.RoundStarted(number, 1, 2, 4, 0, 3, "host:29400", {0: 11, 1: 12}, "all nodes are there")


def rank(number: int, **facts: object) -> RankStatus:
    known = {
        "local_rank": number,
        "node": 0,
        "host": "here",
        "state": "running",
        "pid": 10 + number,
        "exitcode": None,
        "restarts": 0,
        "step": None,
        "total": None,
        "metrics": {},
        "age": None,
        "last_line": "",
    }
    return RankStatus(rank=number, **(known | facts))  # type: ignore[arg-type]


def status(*ranks: RankStatus, **facts: object) -> JobStatus:
    known = {"name": "train", "state": "running", "why": "", "seconds": 2.51, "restarts": 0, "round": 0, "nodes": 1}
    return JobStatus(**(known | facts), ranks=ranks)  # type: ignore[arg-type]


def after(*reported: records.Record) -> JobCourse:
    course = JobCourse()
    for record in reported:
        course = course.after(record)
    return course


STEPS: list[tuple[str, records.Record]] = [
    ("waiting for ranks", records.RanksAwaited("n0")),
    ("starting", received()),
    ("starting", records.RanksAssigned(0, (2, 3), 0.0)),
    ("running", started()),
    ("stopping", records.WorkersStopping(0, "rank 3 failed", 15, 30.0)),
    ("waiting for ranks", records.RanksAwaited("n0")),
    ("starting", received(1, restarts=1)),
    ("running", started(1)),
]


@pytest.mark.parametrize("count", range(len(STEPS) + 1))
def test_the_state_of_a_job_follows_its_records(count: int) -> None:
    assert after(*(record for _, record in STEPS[:count])).state == ["starting", *(state for state, _ in STEPS)][count]


def test_the_course_knows_ranks_round_and_restarts() -> None:
    course = after(*(record for _, record in STEPS))

    assert (course.ranks, course.round, course.restarts, course.node, course.nodes) == ((2, 3), 1, 1, 1, 2)


def test_reason_for_a_stop_is_shown_only_while_the_job_is_stopping() -> None:
    course = after(*(record for _, record in STEPS[:5]))

    assert "rank 3 failed" == course.why
    assert "" == course.after(records.RanksAwaited("n0")).why


def test_other_records_change_nothing() -> None:
    course = after(*(record for _, record in STEPS))

    assert course == course.after(records.AgentSucceeded())


def test_a_status_is_a_table_of_its_ranks() -> None:
    text = str(status(rank(0, step=7, total=30, metrics={"loss": 0.125}, last_line="step 7"), rank(1, step=8)))

    assert text.splitlines() == [
        "job 'train': running for 2.5 s",
        "rank  host  state    pid  step  metrics     last line",
        "0     here  running  10   7/30  loss=0.125  step 7",
        "1     here  running  11   8",
    ]


def test_columns_in_which_nothing_stands_are_left_out() -> None:
    assert str(status(rank(0))).splitlines()[1:] == ["rank  host  state    pid", "0     here  running  10"]


def test_a_job_without_workers_yet_is_one_line() -> None:
    assert "job 'train': starting for 2.5 s" == str(status(state="starting"))


def test_status_text_of_an_ended_job_states_duration_and_reason() -> None:
    text = str(status(state="failed", why="rank 1: ValueError: no", restarts=2))

    assert "job 'train': failed after 2.5 s, restart 2: rank 1: ValueError: no" == text


def test_a_failed_rank_shows_its_exit_code() -> None:
    assert "failed (-9)" in str(rank(0, state="failed", exitcode=-9))


def test_a_long_line_is_cut() -> None:
    assert max(map(len, rank(0, last_line="x" * 500).cells())) == 60


def test_equal_stacks_stand_together_despite_thread_numbers() -> None:
    stack = 'Current thread {} (most recent call first):\n  File "train.py", line 9 in train'
    stacks = Stacks({0: stack.format("0x1"), 1: stack.format("0x2"), 2: "(the process is stopped)"})

    assert str(stacks).splitlines()[0] == "ranks 0-1:"
    assert "rank 2:\n(the process is stopped)" in str(stacks)
    assert 1 == str(stacks).count("train.py")


def test_empty_stacks_are_shown_as_no_running_workers() -> None:
    assert "no worker runs here" == str(Stacks())


def test_a_cell_shows_what_print_shows() -> None:
    """As the value of its last expression."""
    stacks = Stacks({0: "at train.py:7\nat train.py:9"})
    for value in (status(rank(0)), stacks):
        assert str(value) == pretty(value)
