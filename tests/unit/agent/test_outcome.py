"""Failures on their way to peers, and what the job's end means for the caller of each node."""

from __future__ import annotations

import os
import pickle
import time

import pytest

from elasticlib.agent._outcome import agreed, error_of, notes
from elasticlib.agent._policy import Finish, StopRequested
from elasticlib.errors import (
    PreemptedError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    root_cause,
)
from elasticlib.rendezvous import FailureNote, Final

HERE, THERE = "n1/10-aa", "n2/20-bb"
NOTE = FailureNote(3, 1, 77, 1, "a bad value", "ValueError", "Traceback ...", "a hint", False, 2.0)


def failure(rank: int, message: str = "it broke", traceback: str = "", timestamp: float = 1.0) -> ProcessFailure:
    return ProcessFailure(0, 100, 1, "", message=message, traceback=traceback, rank=rank, timestamp=timestamp)


def test_a_failure_travels_with_its_age_and_not_with_the_time_of_a_clock() -> None:
    (note,) = notes([failure(4, timestamp=time.time() - 5.0)])

    assert note.rank == 4
    assert 5.0 <= note.age < 60.0


def test_a_failure_of_a_clock_that_was_set_back_has_no_age() -> None:
    (note,) = notes([failure(4, timestamp=time.time() + 1000.0)])

    assert note.age == 0.0


def test_of_long_texts_the_end_travels() -> None:
    (note,) = notes([failure(4, message="m" * 30_000 + "END", traceback="t" * 30_000 + "END")])

    assert len(note.traceback) <= 20_004 and note.traceback.endswith("tEND")
    assert len(note.message) <= 20_004 and note.message.endswith("mEND")


def test_root_cause_of_another_node_is_reported_beside_own_failures() -> None:
    final = Final(False, "rank 3 failed", THERE, NOTE)

    found = agreed({0: failure(0, timestamp=1.0)}, final, HERE)

    rank, root = root_cause(found)
    assert set(found) == {0, 3}
    assert (rank, root.host, root.message, root.traceback) == (3, "n2", "a bad value", "Traceback ...")
    assert (root.exitcode, root.exception_type, root.hint, root.pid) == (1, "ValueError", "a hint", 77)


def test_root_cause_of_the_job_beats_a_failure_with_an_earlier_clock() -> None:
    own = {0: failure(0, timestamp=1.0), 1: failure(1, timestamp=9.0)}

    found = agreed(own, Final(False, "rank 1 failed", HERE, FailureNote(1, 1, 100, 1)), HERE)

    assert root_cause(found) == (1, own[1])


def test_forgotten_root_cause_of_this_node_is_rebuilt_from_the_note() -> None:
    found = agreed({}, Final(False, "rank 3 failed", HERE, NOTE), HERE)

    assert (found[3].message, found[3].host) == ("a bad value", "n1")


def test_without_a_root_cause_what_failed_here_is_all() -> None:
    own = {0: failure(0)}

    assert agreed(own, Final(False, "closed"), HERE) == agreed(own, None, HERE) == own
    assert own[0].host == os.uname().nodename


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("timeout", RendezvousTimeoutError, "why"),
        ("closed", RendezvousClosedError, "why"),
        ("left", RendezvousClosedError, "why"),
        ("refused", RendezvousClosedError, "this node cannot join the job: why"),
    ],
)
def test_an_end_that_no_worker_caused_is_an_error_by_its_kind(kind: str, expected: type[Exception], text: str) -> None:
    error = error_of(Finish(False, "why", final=Final(False, "why", kind=kind)))

    assert type(error) is expected
    assert str(error) == text


@pytest.mark.parametrize("final", [None, Final(True, "all succeeded"), Final(False, "why", THERE, NOTE)])
def test_success_or_failed_workers_make_no_rendezvous_error(final: Final | None) -> None:
    assert error_of(Finish(final is not None and final.succeeded, "why", final=final)) is None


@pytest.mark.parametrize(
    ("final", "is_preempted"),
    [
        (Final(False, "node a, which hosts the job's store, left: signal 15", kind="closed"), True),
        (Final(False, "too few nodes", kind="timeout"), True),
        (Final(False, "why", kind="failed"), False),
        (Final(False, "why", THERE, NOTE), False),
    ],
)
def test_saved_work_of_a_job_that_another_node_ends_is_preempted(final: Final, is_preempted: bool) -> None:
    error = error_of(Finish(False, "why", final=final, saved=True), {3: "result"})

    assert is_preempted == isinstance(error, PreemptedError)
    assert not isinstance(error, PreemptedError) or {3: "result"} == error.results


@pytest.mark.parametrize("saved", [False, True])
def test_a_job_that_a_person_stops_is_stopped_on_all_nodes(saved: bool) -> None:
    error = error_of(
        Finish(False, "stopped by hand", final=Final(False, "stopped by hand", kind="stopped"), saved=saved)
    )

    assert type(error) is SignalException and "stopped by hand" == str(error)


def test_an_exception_of_a_worker_after_a_notice_is_part_of_the_error() -> None:
    stop = StopRequested(15, "the job's time ends at 12:00:00", is_notice=True)
    failed = ProcessFailure(0, 7, 1, "", message="disk full", exception_type="OSError", rank=3)
    lost = ProcessFailure(1, 8, 1, "", message="reset by peer", exception_type="OSError", rank=1, secondary=True)
    killed = ProcessFailure(2, 9, -9, "", rank=2)

    alone = error_of(Finish(False, "why", stop), {}, {1: lost, 2: killed})
    raised = error_of(Finish(False, "why", stop), {}, {1: lost, 2: killed, 3: failed})

    interrupted = error_of(Finish(False, "why", StopRequested(2)), {}, {3: failed})

    assert str(interrupted).endswith("got SIGINT: its workers were stopped")
    assert "the job's time ends at 12:00:00: its workers were stopped" == str(alone)
    assert str(raised).startswith(f"{alone}; rank 3: ") and "disk full" in str(raised)


@pytest.mark.parametrize("is_notice", [False, True])
def test_error_states_whether_the_scheduler_ended_the_node(is_notice: bool) -> None:
    error = error_of(Finish(False, "why", StopRequested(15, is_notice=is_notice)))

    assert isinstance(error, SignalException) and is_notice == error.is_notice
    assert is_notice == pickle.loads(pickle.dumps(error)).is_notice


def test_a_notice_preempts_and_a_stop_by_the_program_does_not() -> None:
    reason = "the machine is reclaimed"
    notice = error_of(Finish(False, reason, StopRequested(15, reason, is_notice=True), saved=True))
    program = error_of(Finish(False, reason, StopRequested(15, reason), saved=True))

    assert isinstance(notice, PreemptedError) and reason in str(notice)
    assert not isinstance(program, PreemptedError)


def test_preempted_error_of_unstarted_node_states_no_worker_started() -> None:
    stop = StopRequested(15, is_notice=True)
    error = error_of(Finish(False, "signal 15", stop, saved=True, has_run=False))

    assert isinstance(error, PreemptedError) and str(error).endswith("got SIGTERM: no worker had started")


def test_success_of_others_that_voids_own_results_is_a_bare_error() -> None:
    error = error_of(Finish(False, "the results of round 0 do not count", final=Final(True, "all succeeded", round=1)))

    assert RendezvousGracefulExitError is type(error)
    assert "the results of round 0 do not count" == str(error)


def test_that_no_restart_would_help_travels_too() -> None:
    stuck = failure(4)
    stuck.fatal = True

    (note,) = notes([stuck])
    (root,) = agreed({}, Final(False, "it ended", THERE, note), HERE).values()

    assert (True, True) == (note.fatal, root.fatal)
