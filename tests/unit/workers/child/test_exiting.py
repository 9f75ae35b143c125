"""How long a worker may take between its program's outcome and its process' end, and what follows."""

from __future__ import annotations

import pytest

from elasticlib.processes._programs import KILL_SECONDS
from elasticlib.workers.child import _exiting
from elasticlib.workers.child._announcing import Outcome
from elasticlib.workers.child._exiting import Act, Course, Stage

FAILING = [(Outcome.RAISED, 1), (Outcome.RAISED, -2), (Outcome.ENDED, 3)]
WELL = [(Outcome.CLOSING, 0)]
MAIN_PARTS = [Outcome.RETURNED, Outcome.ENDED]


def until_told(course: Course, now: float) -> list[Act]:
    """What is done from *now* on, the stacks being written at once, until the launcher is told."""
    acts: list[Act] = []
    while Act.TELL not in acts:
        assert course.deadline is not None
        now = max(now, course.deadline)
        acts += course.due(now, dumped=True)
    return acts


@pytest.mark.parametrize(("outcome", "status"), FAILING)
def test_a_failure_is_news_when_it_is_announced(outcome: Outcome, status: int) -> None:
    """Not only when the process ends."""
    course = Course(10.0)

    assert course.heard(outcome, status, now=1.0)
    assert (True, Stage.EXITS, 11.0) == (course.failed(), course.stage, course.deadline)


@pytest.mark.parametrize(("outcome", "status"), FAILING + WELL)
def test_who_does_not_end_in_time_is_dumped_told_of_and_stopped(outcome: Outcome, status: int) -> None:
    """The stacks first, then the ladder."""
    course = Course(10.0)
    course.heard(outcome, status, now=0.0)

    assert [] == course.due(9.9, dumped=False)
    assert [Act.DUMP, Act.TELL, Act.TERM] == until_told(course, 10.0)
    assert course.deadline is not None
    assert [Act.ASK_GROUP] == course.due(course.deadline, dumped=True)
    assert [Act.KILL] == course.due(course.deadline, dumped=True)
    assert [Act.GIVE_UP] == course.due(course.deadline, dumped=True)
    assert course.deadline is None


def ended_well(outcome: Outcome, *, was_chosen: bool = False) -> Course:
    """The course of one with *outcome* at 0, which waits for no other rank."""
    course = Course(10.0, was_chosen)
    course.heard(outcome, 0, now=0.0)
    course.release(0.0)
    return course


def test_a_function_that_returned_waits_as_long_as_others_run() -> None:
    course = Course(10.0, was_chosen=True)
    course.heard(Outcome.RETURNED, 0, now=1.0)

    assert (True, None) == (course.waits(), course.deadline)
    course.release(100.0)
    assert (False, Stage.EXITS, 110.0) == (course.waits(), course.stage, course.deadline)
    course.release(105.0)
    assert 110.0 == course.deadline


@pytest.mark.parametrize(("outcome", "status"), [*FAILING, (Outcome.RETURNED, 1), (Outcome.ENDED, 0)])
def test_none_but_a_function_that_returned_waits(outcome: Outcome, status: int) -> None:
    course = Course(10.0)
    course.heard(outcome, status, now=0.0)

    assert not course.waits()


@pytest.mark.parametrize("outcome", MAIN_PARTS)
def test_a_stop_knows_who_waited_then(outcome: Outcome) -> None:
    course = Course(10.0)
    course.heard(outcome, 0, now=0.0)

    assert course.stop(30.0, 1.0, spare_failed=True) and course.stop(5.0, 2.0, spare_failed=False)

    assert (outcome is Outcome.RETURNED, Stage.SIGNALLED) == (course.was_waiting, course.stage)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
def test_a_program_that_ended_well_is_reported_once_and_let_be(outcome: Outcome) -> None:
    """Threads that work on are a legitimate program, whether it is a script or a function."""
    course = ended_well(outcome)

    assert [Act.DUMP, Act.TELL] == until_told(course, 10.0)
    assert (Stage.LINGERS, None, False) == (course.stage, course.deadline, course.overdue)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
@pytest.mark.parametrize("code", [-15, -9, 0])
def test_chosen_timeout_makes_a_failure_of_a_program_that_ended_well(outcome: Outcome, code: int) -> None:
    """What its threads were at is cut off, also where the process takes the signal for an order to end with 0."""
    course = ended_well(outcome, was_chosen=True)

    assert [Act.DUMP, Act.TELL, Act.TERM] == until_told(course, 10.0)
    assert (code or -15) == course.exitcode(code)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
@pytest.mark.parametrize("told_before", [False, True])
def test_finalizers_have_a_time_limit_and_change_no_status(told_before: bool, outcome: Outcome) -> None:
    """Once its threads and exit handlers are done, nothing of the user's is left to wait for."""
    course = ended_well(outcome)
    if told_before:
        until_told(course, 10.0)

    assert not course.heard(Outcome.CLOSING, 0, now=50.0)
    assert 60.0 == course.deadline
    assert [Act.DUMP, Act.TELL, Act.TERM] == until_told(course, 60.0)
    assert 0 == course.exitcode(-15)


def last_runs(exit_timeout: float, *, was_chosen: bool = True, is_function: bool = True) -> Course:
    """The course of one that runs when all others have ended, at 0."""
    course = Course(exit_timeout, was_chosen)
    course.note_others_finished(0.0, is_function)
    return course


def looked_at(course: Course, returned: list[bool]) -> list[tuple[float, Act]]:
    """What is done and when, while looks find that a function has *returned*, or not; stacks are there in no time."""
    done = []
    for at_look in returned:
        if course.deadline is None:
            break
        now = course.deadline
        assert [Act.DUMP] == course.due(now, dumped=False)
        done += [(now, act) for act in course.due(now + _exiting._DUMP_LOOK, dumped=True, returned=at_look)]
    return done


@pytest.mark.parametrize(
    ("exit_timeout", "was_chosen", "is_function", "returned"),
    [(2.0, True, False, False), (2.0, True, True, False), (300.0, True, True, False), (2.0, False, True, True)],
    ids=["script", "function", "long", "unset"],
)
def test_the_last_worker_is_told_of_once_and_may_take_any_time(
    exit_timeout: float, was_chosen: bool, is_function: bool, returned: bool
) -> None:
    """It may write a checkpoint."""
    course = last_runs(exit_timeout, was_chosen=was_chosen, is_function=is_function)

    assert [(30.0, Act.TELL_LAST_RUNS)] == looked_at(course, [returned] * 9)
    assert (30.0, None) == course.time_of_last_runs(30.0)


@pytest.mark.parametrize(("exit_timeout", "first"), [(2.0, 2.0), (300.0, 30.0)])
def test_chosen_timeout_ends_a_function_that_returned_at_both_looks(exit_timeout: float, first: float) -> None:
    """It counts from the first of them; its local variables are being destroyed all that time."""
    course = last_runs(exit_timeout)
    told, (second, *ended) = looked_at(course, [True])[0], (course.deadline, *looked_at(course, [True]))

    assert ((first, Act.TELL_LAST_RUNS), exit_timeout) == (told, course.time_of_last_runs(first)[1])
    assert second == pytest.approx(first + exit_timeout, abs=0.1)
    assert [(second, Act.TELL), (second, Act.TERM)] == ended
    assert (-15, exit_timeout) == (course.exitcode(-15), course.facts_of_end(-15)["overdue"])


def test_a_function_that_works_at_the_second_look_runs_on() -> None:
    course = last_runs(2.0)

    assert [(2.0, Act.TELL_LAST_RUNS)] == looked_at(course, [True, False, False])
    assert (None, False) == (course.deadline, course.overdue)


def test_stacks_that_were_not_seen_end_no_last_worker() -> None:
    course = last_runs(30.0)
    course.due(30.0, dumped=False)

    assert [] == course.due(30.0 + _exiting._DUMP_LOOK, dumped=False)
    assert [Act.TELL_LAST_RUNS] == course.due(30.0 + _exiting._DUMP_LIMIT, dumped=False)
    assert course.deadline is None


def test_last_worker_has_its_whole_exit_timeout_after_its_program() -> None:
    course = last_runs(10.0)

    course.heard(Outcome.RETURNED, 0, now=9.0)
    course.release(9.0)

    assert (Stage.EXITS, 19.0) == (course.stage, course.deadline)


@pytest.mark.parametrize("stops", [False, True])
def test_worker_that_is_over_or_stopped_is_not_the_last_that_runs(stops: bool) -> None:
    course = Course(10.0)
    if stops:
        course.stop(30.0, 0.0, spare_failed=False)
    else:
        course.heard(Outcome.RETURNED, 0, now=0.0)
    stage = course.stage

    course.note_others_finished(0.0, is_function=True)

    assert stage is course.stage and stage is not Stage.LAST_RUNS


def test_a_stop_leaves_a_failed_worker_the_time_for_its_exit_handlers() -> None:
    """Where it is stopped because of a failure; an operator's signal reaches everyone."""
    course, other = Course(10.0), Course(10.0)
    course.heard(Outcome.RAISED, 1, now=0.0)

    assert not course.stop(30.0, now=1.0, spare_failed=True)
    assert 10.0 == course.deadline
    assert other.stop(30.0, now=1.0, spare_failed=True)
    assert course.stop(30.0, now=2.0, spare_failed=False)
    assert (Stage.SIGNALLED, 17.0) == (course.stage, course.deadline)
    assert [Act.ASK_GROUP] == course.due(17.0, dumped=True)
    assert 32.0 == course.deadline


def test_a_group_that_gets_the_signal_at_once_does_not_get_it_again() -> None:
    course = Course(for_group=True)
    course.stop(30.0, now=0.0, spare_failed=False)

    assert (30.0, [Act.KILL]) == (course.deadline, course.due(30.0, dumped=True))


def test_a_group_has_the_rest_of_the_time_of_the_worker_that_ended() -> None:
    course = Course()
    course.stop(30.0, now=0.0, spare_failed=False)

    assert course.leaves_time_to_group(2.0)
    assert course.deadline is not None and course.deadline < 3.0
    assert [Act.LOOK_AT_GROUP] == course.due(29.9, dumped=True)
    assert [Act.END_GROUP] == course.due(30.0, dumped=True)
    assert (0, -15) == (course.exitcode(0), course.exitcode(-15))


def test_a_group_has_little_time_where_a_restart_waits() -> None:
    course = Course()
    course.stop(30.0, now=0.0, spare_failed=True)
    course.leaves_time_to_group(2.0)

    assert [Act.LOOK_AT_GROUP] == course.due(2.5, dumped=True)
    assert [Act.END_GROUP] == course.due(3.0, dumped=True)


def test_a_hurried_stop_leaves_a_group_less_time() -> None:
    course = Course()
    course.stop(30.0, now=0.0, spare_failed=False)
    course.leaves_time_to_group(2.0)

    assert not course.stop(0.0, now=3.0, spare_failed=False)
    assert [Act.END_GROUP] == course.due(3.0, dumped=True)


@pytest.mark.parametrize("stopped", [False, True])
def test_group_of_a_worker_that_was_not_stopped_is_not_waited_for(stopped: bool) -> None:
    course = Course()
    if stopped:
        course.stop(0.0, now=0.0, spare_failed=False)
        course.due(0.0, dumped=True)

    assert not course.leaves_time_to_group(1.0)


def test_nothing_is_stronger_than_the_kill() -> None:
    course = Course()
    course.stop(0.0, now=0.0, spare_failed=False)
    course.due(0.0, dumped=False)

    assert not course.stop(30.0, now=1.0, spare_failed=False)
    assert KILL_SECONDS == course.deadline


def test_exit_code_of_a_program_outlives_our_signal_to_its_process() -> None:
    """Only where we sent it: a crash in an exit handler is a crash."""
    returned, crashed, asked = Course(), Course(), Course()
    returned.heard(Outcome.RETURNED, 0, now=0.0)
    crashed.heard(Outcome.RETURNED, 0, now=0.0)
    returned.stop(1.0, now=1.0, spare_failed=False)
    asked.stop(1.0, now=1.0, spare_failed=False)

    assert (0, -11, -15) == (returned.exitcode(-15), crashed.exitcode(-11), asked.exitcode(-15))


@pytest.mark.parametrize("code", [-11, -6, 9, 0])
def test_a_final_status_stands_however_the_process_ends(code: int) -> None:
    """All that was to be written is written; only finalizers are left, whose crash is told of."""
    course = Course()
    course.heard(Outcome.ENDED, 0, now=0.0)
    course.heard(Outcome.CLOSING, 0, now=0.0)

    assert not course.heard(Outcome.FINAL, 0, now=0.0)
    assert (0, code != 0) == (course.exitcode(code), course.crashed_late(code))


def test_output_that_was_lost_at_the_end_is_in_the_final_status() -> None:
    course = Course()
    course.heard(Outcome.RETURNED, 0, now=0.0)

    course.heard(Outcome.FINAL, 120, now=0.0)

    assert (120, False) == (course.exitcode(120), course.crashed_late(120))


def test_who_is_stopped_in_its_last_moments_has_not_crashed() -> None:
    course = Course()
    course.heard(Outcome.FINAL, 0, now=0.0)
    course.stop(1.0, now=1.0, spare_failed=False)

    assert (0, False) == (course.exitcode(-15), course.crashed_late(-15))


def test_stacks_that_never_come_hold_nobody_up() -> None:
    course = Course(1.0)
    course.heard(Outcome.RAISED, 1, now=0.0)
    acts, now = course.due(1.0, dumped=False), 1.0
    while Act.TELL not in acts:
        assert course.deadline is not None
        now = course.deadline
        acts += course.due(now, dumped=False)

    assert [Act.DUMP, Act.TELL, Act.TERM] == acts
    assert now <= 1.1 + _exiting._DUMP_LIMIT
