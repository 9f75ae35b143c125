"""Time between a program's outcome and the end of its process, and the steps after its limit."""

from __future__ import annotations

import pytest

from elasticlib.processes._programs import KILL_SECONDS
from elasticlib.workers.child import _exiting
from elasticlib.workers.child._announcing import ProgramOutcome
from elasticlib.workers.child._exiting import ExitAction, ExitCourse, Stage

FAILING = [(ProgramOutcome.RAISED, 1), (ProgramOutcome.RAISED, -2), (ProgramOutcome.ENDED, 3)]
WELL = [(ProgramOutcome.CLOSING, 0)]
MAIN_PARTS = [ProgramOutcome.RETURNED, ProgramOutcome.ENDED]


def due_until_report(course: ExitCourse, now: float) -> list[ExitAction]:
    """Return the actions from *now* up to the report to the launcher; stacks take no time."""
    acts: list[ExitAction] = []
    while ExitAction.REPORT_OVERDUE not in acts:
        assert course.deadline is not None
        now = max(now, course.deadline)
        acts += course.due(now, dumped=True)
    return acts


@pytest.mark.parametrize(("outcome", "status"), FAILING)
def test_failure_counts_as_soon_as_it_is_announced(outcome: ProgramOutcome, status: int) -> None:
    """Not only when the process ends."""
    course = ExitCourse(10.0)

    assert course.announced(outcome, status, now=1.0)
    assert (True, Stage.EXITS, 11.0) == (course.program.failed(), course.stage, course.deadline)


@pytest.mark.parametrize(("outcome", "status"), FAILING + WELL)
def test_worker_not_ended_in_time_is_dumped_then_reported_and_stopped(outcome: ProgramOutcome, status: int) -> None:
    """The stacks first, then the ladder."""
    course = ExitCourse(10.0)
    course.announced(outcome, status, now=0.0)

    assert [] == course.due(9.9, dumped=False)
    assert [ExitAction.DUMP, ExitAction.REPORT_OVERDUE, ExitAction.TERM] == due_until_report(course, 10.0)
    assert course.deadline is not None
    assert [ExitAction.SIGNAL_GROUP] == course.due(course.deadline, dumped=True)
    assert [ExitAction.KILL] == course.due(course.deadline, dumped=True)
    assert [ExitAction.GIVE_UP] == course.due(course.deadline, dumped=True)
    assert course.deadline is None


def ended_well(outcome: ProgramOutcome, *, was_chosen: bool = False) -> ExitCourse:
    """The course of one with *outcome* at 0, which waits for no other rank."""
    course = ExitCourse(10.0, was_chosen)
    course.announced(outcome, 0, now=0.0)
    course.release(0.0)
    return course


def test_a_function_that_returned_waits_as_long_as_others_run() -> None:
    course = ExitCourse(10.0, was_chosen=True)
    course.announced(ProgramOutcome.RETURNED, 0, now=1.0)

    assert (True, None) == (course.waits(), course.deadline)
    course.release(100.0)
    assert (False, Stage.EXITS, 110.0) == (course.waits(), course.stage, course.deadline)
    course.release(105.0)
    assert 110.0 == course.deadline


@pytest.mark.parametrize(("outcome", "status"), [*FAILING, (ProgramOutcome.RETURNED, 1), (ProgramOutcome.ENDED, 0)])
def test_none_but_a_function_that_returned_waits(outcome: ProgramOutcome, status: int) -> None:
    course = ExitCourse(10.0)
    course.announced(outcome, status, now=0.0)

    assert not course.waits()


@pytest.mark.parametrize("outcome", MAIN_PARTS)
def test_a_stop_knows_who_waited_then(outcome: ProgramOutcome) -> None:
    course = ExitCourse(10.0)
    course.announced(outcome, 0, now=0.0)

    assert course.stop(30.0, 1.0, spare_failed=True) and course.stop(5.0, 2.0, spare_failed=False)

    assert (outcome is ProgramOutcome.RETURNED, Stage.SIGNALLED) == (course.was_waiting, course.stage)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
def test_a_program_that_ended_well_is_reported_once_and_let_be(outcome: ProgramOutcome) -> None:
    """Threads that work on are a legitimate program, whether it is a script or a function."""
    course = ended_well(outcome)

    assert [ExitAction.DUMP, ExitAction.REPORT_OVERDUE] == due_until_report(course, 10.0)
    assert (Stage.LINGERS, None, False) == (course.stage, course.deadline, course.overdue)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
@pytest.mark.parametrize("code", [-15, -9, 0])
def test_chosen_timeout_makes_a_failure_of_a_program_that_ended_well(outcome: ProgramOutcome, code: int) -> None:
    """The threads' work is cut off, even if the process exits with 0 after the signal."""
    course = ended_well(outcome, was_chosen=True)

    assert [ExitAction.DUMP, ExitAction.REPORT_OVERDUE, ExitAction.TERM] == due_until_report(course, 10.0)
    assert (code or -15) == course.exitcode(code)


@pytest.mark.parametrize("outcome", MAIN_PARTS)
@pytest.mark.parametrize("reported_before", [False, True])
def test_finalizers_have_a_time_limit_and_change_no_status(reported_before: bool, outcome: ProgramOutcome) -> None:
    """Once its threads and exit handlers are done, nothing of the user's is left to wait for."""
    course = ended_well(outcome)
    if reported_before:
        due_until_report(course, 10.0)

    assert not course.announced(ProgramOutcome.CLOSING, 0, now=50.0)
    assert 60.0 == course.deadline
    assert [ExitAction.DUMP, ExitAction.REPORT_OVERDUE, ExitAction.TERM] == due_until_report(course, 60.0)
    assert 0 == course.exitcode(-15)


def last_runs(exit_timeout: float, *, was_chosen: bool = True, is_function: bool = True) -> ExitCourse:
    """The course of one that runs when all others have ended, at 0."""
    course = ExitCourse(exit_timeout, was_chosen)
    course.note_others_finished(0.0, is_function)
    return course


def looked_at(course: ExitCourse, returned: list[bool]) -> list[tuple[float, ExitAction]]:
    """Return the timed actions of looks that find *returned* or not; stacks take no time."""
    done = []
    for at_look in returned:
        if course.deadline is None:
            break
        now = course.deadline
        assert [ExitAction.DUMP] == course.due(now, dumped=False)
        done += [(now, act) for act in course.due(now + _exiting._DUMP_LOOK, dumped=True, returned=at_look)]
    return done


@pytest.mark.parametrize(
    ("exit_timeout", "was_chosen", "is_function", "returned"),
    [(2.0, True, False, False), (2.0, True, True, False), (300.0, True, True, False), (2.0, False, True, True)],
    ids=["script", "function", "long", "unset"],
)
def test_last_worker_is_reported_once_and_may_take_any_time(
    exit_timeout: float, was_chosen: bool, is_function: bool, returned: bool
) -> None:
    """It may write a checkpoint."""
    course = last_runs(exit_timeout, was_chosen=was_chosen, is_function=is_function)

    assert [(30.0, ExitAction.REPORT_LAST_RUNS)] == looked_at(course, [returned] * 9)
    assert (30.0, None) == course.time_of_last_runs(30.0)


@pytest.mark.parametrize(("exit_timeout", "first"), [(2.0, 2.0), (300.0, 30.0)])
def test_chosen_timeout_ends_a_function_that_returned_at_both_looks(exit_timeout: float, first: float) -> None:
    """It counts from the first of them; its local variables are being destroyed all that time."""
    course = last_runs(exit_timeout)
    last_runs_report, (second, *ended) = looked_at(course, [True])[0], (course.deadline, *looked_at(course, [True]))

    assert ((first, ExitAction.REPORT_LAST_RUNS), exit_timeout) == (
        last_runs_report,
        course.time_of_last_runs(first)[1],
    )
    assert second == pytest.approx(first + exit_timeout, abs=0.1)
    assert [(second, ExitAction.REPORT_OVERDUE), (second, ExitAction.TERM)] == ended
    assert (-15, exit_timeout) == (course.exitcode(-15), course.facts_of_end(-15)["overdue"])


def test_a_function_that_works_at_the_second_look_runs_on() -> None:
    course = last_runs(2.0)

    assert [(2.0, ExitAction.REPORT_LAST_RUNS)] == looked_at(course, [True, False, False])
    assert (None, False) == (course.deadline, course.overdue)


def test_stacks_that_were_not_seen_end_no_last_worker() -> None:
    course = last_runs(30.0)
    course.due(30.0, dumped=False)

    assert [] == course.due(30.0 + _exiting._DUMP_LOOK, dumped=False)
    assert [ExitAction.REPORT_LAST_RUNS] == course.due(30.0 + _exiting._DUMP_LIMIT, dumped=False)
    assert course.deadline is None


def test_last_worker_has_its_whole_exit_timeout_after_its_program() -> None:
    course = last_runs(10.0)

    course.announced(ProgramOutcome.RETURNED, 0, now=9.0)
    course.release(9.0)

    assert (Stage.EXITS, 19.0) == (course.stage, course.deadline)


@pytest.mark.parametrize("stops", [False, True])
def test_worker_that_is_over_or_stopped_is_not_the_last_that_runs(stops: bool) -> None:
    course = ExitCourse(10.0)
    if stops:
        course.stop(30.0, 0.0, spare_failed=False)
    else:
        course.announced(ProgramOutcome.RETURNED, 0, now=0.0)
    stage = course.stage

    course.note_others_finished(0.0, is_function=True)

    assert stage is course.stage and stage is not Stage.LAST_RUNS


def test_a_stop_leaves_a_failed_worker_the_time_for_its_exit_handlers() -> None:
    """This holds for a stop after a failure; an operator's signal reaches every worker."""
    course, other = ExitCourse(10.0), ExitCourse(10.0)
    course.announced(ProgramOutcome.RAISED, 1, now=0.0)

    assert not course.stop(30.0, now=1.0, spare_failed=True)
    assert 10.0 == course.deadline
    assert other.stop(30.0, now=1.0, spare_failed=True)
    assert course.stop(30.0, now=2.0, spare_failed=False)
    assert (Stage.SIGNALLED, 17.0) == (course.stage, course.deadline)
    assert [ExitAction.SIGNAL_GROUP] == course.due(17.0, dumped=True)
    assert 32.0 == course.deadline


def test_a_group_that_gets_the_signal_at_once_does_not_get_it_again() -> None:
    course = ExitCourse(for_group=True)
    course.stop(30.0, now=0.0, spare_failed=False)

    assert (30.0, [ExitAction.KILL]) == (course.deadline, course.due(30.0, dumped=True))


def test_a_group_has_the_rest_of_the_time_of_the_worker_that_ended() -> None:
    course = ExitCourse()
    course.stop(30.0, now=0.0, spare_failed=False)

    assert course.leaves_time_to_group(2.0)
    assert course.deadline is not None and course.deadline < 3.0
    assert [ExitAction.LOOK_AT_GROUP] == course.due(29.9, dumped=True)
    assert [ExitAction.END_GROUP] == course.due(30.0, dumped=True)
    assert (0, -15) == (course.exitcode(0), course.exitcode(-15))


def test_a_group_has_little_time_where_a_restart_waits() -> None:
    course = ExitCourse()
    course.stop(30.0, now=0.0, spare_failed=True)
    course.leaves_time_to_group(2.0)

    assert [ExitAction.LOOK_AT_GROUP] == course.due(2.5, dumped=True)
    assert [ExitAction.END_GROUP] == course.due(3.0, dumped=True)


def test_a_hurried_stop_leaves_a_group_less_time() -> None:
    course = ExitCourse()
    course.stop(30.0, now=0.0, spare_failed=False)
    course.leaves_time_to_group(2.0)

    assert not course.stop(0.0, now=3.0, spare_failed=False)
    assert [ExitAction.END_GROUP] == course.due(3.0, dumped=True)


@pytest.mark.parametrize("stopped", [False, True])
def test_group_of_a_worker_that_was_not_stopped_is_not_waited_for(stopped: bool) -> None:
    course = ExitCourse()
    if stopped:
        course.stop(0.0, now=0.0, spare_failed=False)
        course.due(0.0, dumped=True)

    assert not course.leaves_time_to_group(1.0)


def test_nothing_is_stronger_than_the_kill() -> None:
    course = ExitCourse()
    course.stop(0.0, now=0.0, spare_failed=False)
    course.due(0.0, dumped=False)

    assert not course.stop(30.0, now=1.0, spare_failed=False)
    assert KILL_SECONDS == course.deadline


def test_exit_code_of_a_program_outlives_our_signal_to_its_process() -> None:
    """Only where we sent it: a crash in an exit handler is a crash."""
    returned, crashed, stopped = ExitCourse(), ExitCourse(), ExitCourse()
    returned.announced(ProgramOutcome.RETURNED, 0, now=0.0)
    crashed.announced(ProgramOutcome.RETURNED, 0, now=0.0)
    returned.stop(1.0, now=1.0, spare_failed=False)
    stopped.stop(1.0, now=1.0, spare_failed=False)

    assert (0, -11, -15) == (returned.exitcode(-15), crashed.exitcode(-11), stopped.exitcode(-15))


@pytest.mark.parametrize("code", [-11, -6, 9, 0])
def test_a_final_status_stands_however_the_process_ends(code: int) -> None:
    """All that was to be written is written; only finalizers are left, whose crash is told of."""
    course = ExitCourse()
    course.announced(ProgramOutcome.ENDED, 0, now=0.0)
    course.announced(ProgramOutcome.CLOSING, 0, now=0.0)

    assert not course.announced(ProgramOutcome.FINAL, 0, now=0.0)
    assert (0, code != 0) == (course.exitcode(code), course.crashed_late(code))


def test_output_that_was_lost_at_the_end_is_in_the_final_status() -> None:
    course = ExitCourse()
    course.announced(ProgramOutcome.RETURNED, 0, now=0.0)

    course.announced(ProgramOutcome.FINAL, 120, now=0.0)

    assert (120, False) == (course.exitcode(120), course.crashed_late(120))


def test_worker_stopped_in_its_last_moments_has_not_crashed() -> None:
    course = ExitCourse()
    course.announced(ProgramOutcome.FINAL, 0, now=0.0)
    course.stop(1.0, now=1.0, spare_failed=False)

    assert (0, False) == (course.exitcode(-15), course.crashed_late(-15))


def test_stacks_that_never_arrive_do_not_block_the_stop() -> None:
    course = ExitCourse(1.0)
    course.announced(ProgramOutcome.RAISED, 1, now=0.0)
    acts, now = course.due(1.0, dumped=False), 1.0
    while ExitAction.REPORT_OVERDUE not in acts:
        assert course.deadline is not None
        now = course.deadline
        acts += course.due(now, dumped=False)

    assert [ExitAction.DUMP, ExitAction.REPORT_OVERDUE, ExitAction.TERM] == acts
    assert now <= 1.1 + _exiting._DUMP_LIMIT
