"""By what the kernel knows a caller, and which of its settings a worker can take over from its fork server."""

from __future__ import annotations

import ctypes
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from elasticlib.processes import CallerIdentity, Surroundings, _caller

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
def test_settings_can_be_taken_over_only_if_they_need_no_privilege(change: dict[str, Any], can: bool) -> None:
    assert can == replace(_BEGINNING, **change).can_follow(_BEGINNING)


@pytest.mark.parametrize(
    ("begin", "wanted", "can"),
    [
        ({"policy": os.SCHED_IDLE}, {"policy": os.SCHED_OTHER}, False),
        ({"policy": os.SCHED_BATCH}, {"policy": os.SCHED_OTHER}, True),
        ({"policy": os.SCHED_RR, "priority": 1}, {"policy": os.SCHED_RR, "priority": 1}, True),
        ({"policy": os.SCHED_RR, "priority": 1}, {"policy": os.SCHED_RR, "priority": 2}, False),
        ({"limits": [(_FILES, (_UNLIMITED, _UNLIMITED))]}, {"limits": [(_FILES, (10, 10))]}, True),
    ],
    ids=str,
)
def test_beginning_that_a_process_may_not_leave_needs_another_fork_server(
    begin: dict[str, Any], wanted: dict[str, Any], can: bool
) -> None:
    assert can == Surroundings(**wanted).can_follow(Surroundings(**begin))


def test_a_policy_that_children_do_not_get_is_not_the_workers() -> None:
    """As `sched_setscheduler(2)` has it; of one thread, which ends."""

    def reset_on_fork() -> Surroundings:
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        return Surroundings.now()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(reset_on_fork).result()

    assert (os.SCHED_BATCH, 0) == (found.policy, found.priority)


def test_surroundings_are_unchanged_after_sending_over_a_channel() -> None:
    sent = Surroundings.now()

    found = Surroundings.of(json.loads(json.dumps(sent.plain())))

    assert sent.plain() | {"limits": []} == found.plain() | {"limits": []}
    assert [[number, list(values)] for number, values in sent.limits] == found.limits


# The identity of a thread.

_PR_SET_NO_NEW_PRIVS = 38


def test_a_program_that_changed_nothing_is_the_same() -> None:
    assert CallerIdentity.now() == CallerIdentity.now()


def test_a_thread_has_credentials_of_its_own() -> None:
    """On Linux; those of the thread that launches are what counts."""

    def give_up_privileges() -> CallerIdentity:
        assert 0 == ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return CallerIdentity.now()

    before = CallerIdentity.now()
    with ThreadPoolExecutor(1) as thread:
        restricted = thread.submit(give_up_privileges).result()

    assert before != restricted
    assert before == CallerIdentity.now()


def test_caller_is_identified_by_system_calls_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: object, *_: object, **__: object) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(_caller.os, "open", hidden)
    monkeypatch.setattr(_caller.os, "readlink", hidden)
    before = CallerIdentity.now()
    monkeypatch.setattr(os, "getresuid", lambda: (65534, 65534, 65534))

    assert before != CallerIdentity.now()
