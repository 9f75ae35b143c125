"""The end of a launch for its scheduler: exit status, termination log, and whether the job is requeued."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from attrs import evolve

from elasticlib.cli import ExitSettings, exit_status
from elasticlib.cli._verdict import may_be_requeued, termination_message
from elasticlib.engines import EngineContext
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ElasticError,
    LaunchInterrupted,
    PreemptedError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousNotFoundError,
    SignalException,
    StartError,
)

SETTINGS = ExitSettings(preempt_exit=75, failure_exit=93, requeue=2)


def failed(exitcode: int = 1, **facts: Any) -> ChildFailedError:
    failure = ProcessFailure(0, 7, exitcode, "", message="bad value", rank=0, **facts)
    return ChildFailedError("train.py", {0: failure})


def lost(error: ElasticError, *hosts: str) -> ElasticError:
    error.lost_hosts = hosts
    return error


def noticed() -> ElasticError:
    error = SignalException("stopped before all had saved", signal.SIGTERM)
    error.is_notice = True
    return error


PREEMPTED = PreemptedError("the time is over", signal.SIGTERM)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PREEMPTED, 75),
        (SignalException("stopped", signal.SIGTERM), 1),
        (noticed(), 1),
        (LaunchInterrupted("interrupted", signal.SIGINT), 1),
        (failed(), 93),
        (failed(fatal=True), 93),
        (failed(exitcode=-9), 1),
        (failed(exitcode=-9, fatal=True), 93),
        # It raised, and was killed with the others.
        (failed(exitcode=-9, exception_type="ValueError"), 93),
        (failed(secondary=True), 1),
        (failed(external=True), 1),
        (failed(process="worker store"), 1),
        (ConfigError("a bad option"), 2),
        (RendezvousGracefulExitError("not needed"), 0),
        (RendezvousClosedError("too few nodes"), 1),
        (StartError("no memory"), 1),
    ],
)
def test_the_exit_status_follows_from_the_error(error: ElasticError, status: int) -> None:
    assert status == exit_status(error, SETTINGS)


@pytest.mark.parametrize(
    ("error", "restarts", "requeued"),
    [
        (PREEMPTED, 0, True),
        (PREEMPTED, 1, True),
        (PREEMPTED, 2, False),
        (noticed(), 1, True),
        (noticed(), 2, False),
        (lost(RendezvousClosedError("too few nodes"), "n2"), 0, True),
        (RendezvousClosedError("too few nodes"), 0, False),
        (RendezvousConnectionError("the store is gone"), 0, True),
        (RendezvousNotFoundError("no store"), 0, False),
        (lost(failed(), "n2"), 0, False),
        (SignalException("stopped", signal.SIGTERM), 0, False),
        (LaunchInterrupted("interrupted", signal.SIGINT), 0, False),
    ],
)
def test_a_preemption_and_a_lost_node_requeue_the_job(error: ElasticError, restarts: int, requeued: bool) -> None:
    engine = EngineContext("slurm", restart_count=restarts)

    assert requeued == may_be_requeued(error, evolve(SETTINGS, engine=engine))
    assert not may_be_requeued(error, ExitSettings(engine=engine))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (failed(), ("rank 0", "bad value", "another try would fail again")),
        (failed(exitcode=-9), ("rank 0", "bad value")),
        (lost(RendezvousClosedError("too few\nnodes"), "n2", "n3"), ("too few nodes", "lost hosts: n2, n3")),
        (LaunchInterrupted("", signal.SIGINT), ("LaunchInterrupted",)),
        (PREEMPTED, ("the time is over",)),
    ],
)
def test_the_termination_log_has_the_root_cause_in_one_line(error: ElasticError, parts: tuple[str, ...]) -> None:
    text = termination_message(error)

    assert all(part in text for part in parts) and "\n" not in text


def test_termination_log_is_no_longer_than_kubernetes_keeps() -> None:
    assert 4095 <= len(termination_message(RendezvousClosedError("é" * 5000)).encode()) <= 4096
