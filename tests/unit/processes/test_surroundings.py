"""Which settings a worker can take over, by where its fork server began."""

from __future__ import annotations

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from elasticlib.processes import Surroundings

_UNLIMITED = resource.RLIM_INFINITY
_FILES = resource.RLIMIT_NOFILE
_BEGINNING = Surroundings(nice=5, oom_score_adj=100, limits=[(_FILES, (64, 1000))])


@pytest.mark.parametrize(
    ("change", "can"),
    [
        ({}, True),
        ({"umask": 0o077, "timer_slack": 1, "coredump_filter": 0, "is_dumpable": False}, True),
        ({"nice": 6}, True),
        ({"nice": 4}, False),
        ({"oom_score_adj": 101}, True),
        ({"oom_score_adj": 99}, False),
        ({"limits": [(_FILES, (1000, 1000))]}, True),
        ({"limits": [(_FILES, (64, 1001))]}, False),
        ({"limits": [(_FILES, (64, _UNLIMITED))]}, False),
        ({"policy": os.SCHED_BATCH}, True),
        ({"policy": os.SCHED_IDLE}, True),
        ({"policy": os.SCHED_FIFO, "priority": 1}, False),
    ],
    ids=str,
)
def test_what_needs_no_privilege_can_follow(change: dict[str, Any], can: bool) -> None:
    assert can == replace(_BEGINNING, **change).can_follow(_BEGINNING)


@pytest.mark.parametrize(
    ("begin", "wanted", "can"),
    [
        ((os.SCHED_IDLE, 0), (os.SCHED_OTHER, 0), False),
        ((os.SCHED_BATCH, 0), (os.SCHED_OTHER, 0), True),
        ((os.SCHED_RR, 1), (os.SCHED_RR, 1), True),
        ((os.SCHED_RR, 1), (os.SCHED_RR, 2), False),
        ((os.SCHED_RR, 1), (os.SCHED_OTHER, 0), False),
    ],
)
def test_policies_that_a_process_may_not_leave_need_another_fork_server(
    begin: tuple[int, int], wanted: tuple[int, int], can: bool
) -> None:
    before, after = (Surroundings(policy=policy, priority=priority) for policy, priority in (begin, wanted))

    assert can == after.can_follow(before)


def test_an_unlimited_beginning_can_be_followed_by_any_limit() -> None:
    beginning = Surroundings(limits=[(_FILES, (_UNLIMITED, _UNLIMITED))])

    assert Surroundings(limits=[(_FILES, (10, 10))]).can_follow(beginning)


def test_a_policy_that_children_do_not_get_is_not_the_workers() -> None:
    """As `sched_setscheduler(2)` has it; of one thread, which ends."""

    def reset_on_fork() -> Surroundings:
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        return Surroundings.now()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(reset_on_fork).result()

    assert (os.SCHED_BATCH, 0) == (found.policy, found.priority)


def test_it_comes_over_a_channel_as_it_was() -> None:
    sent = Surroundings.now()

    found = Surroundings.of(json.loads(json.dumps(sent.plain())))

    assert sent.plain() | {"limits": []} == found.plain() | {"limits": []}
    assert [[number, list(values)] for number, values in sent.limits] == found.limits
