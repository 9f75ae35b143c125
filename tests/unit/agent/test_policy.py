"""Actions of an agent on its workers: each line of the table, then rules for any events."""

from __future__ import annotations

import itertools
import signal
from typing import Any, get_args

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from elasticlib.agent import _policy
from elasticlib.agent._policy import (
    Action,
    AgentState,
    Agree,
    AskForRanks,
    AskWorkers,
    AwaitReturn,
    CloseJob,
    Event,
    Finish,
    LeaveJob,
    Phase,
    Propose,
    ReportFailed,
    ReportStopped,
    ReportSucceeded,
    Start,
    StopDue,
    StopRequested,
    StopWorkers,
    WantStop,
    WorkersFailed,
    WorkersGone,
    WorkersSucceeded,
    WorkerStoreLost,
    step,
)
from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous import ContactLost, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous.protocol import StopAgreed, StopAsked, StopProposed
from elasticlib.rendezvous.protocol._messages import StoreGone


def assignment(number: int = 0) -> RankAssignment:
    return RankAssignment(number, 0, 1, 0, 2, 0, 2, number, 3, ("127.0.0.1",), 29500, "all nodes are there")


AGAIN = RoundEnd(0, "rank 1 failed", restart=True)
NO_MORE = RoundEnd(0, "rank 1 failed; no restarts are allowed", restart=False)
WELL = Final(True, "all succeeded in round 0", round=0)
LATER = Final(True, "all succeeded in round 1", round=1)
BADLY = Final(False, "rank 1 failed")
LOST = ContactLost("no answer for 6 s", 1.5)
STORE_LOST = StoreGone("the host of the job's store is gone")
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


def after(*events: Event) -> tuple[AgentState, tuple[Action, ...]]:
    """The state after *events* from the beginning, and the actions of the last one."""
    state, actions = _policy.begin()
    for event in events:
        state, actions = step(state, event)
    return state, actions


RUNNING: tuple[Event, ...] = (assignment(),)
STOPPING: tuple[Event, ...] = (*RUNNING, WorkersFailed("rank 1 failed"))
WAITING: tuple[Event, ...] = (*RUNNING, WorkersSucceeded())
DONE: tuple[Event, ...] = (*WAITING, WELL)


def test_an_agent_begins_by_asking_for_ranks() -> None:
    state, actions = _policy.begin()

    assert (Phase.JOINING, (AskForRanks(),)) == (state.phase, actions)


SIGNAL = StopRequested(TERM)
REQUEST = StopRequested(TERM, "the program said so", 2.5)
ENDED_WELL = WorkersGone(succeeded=True)
SECOND_FAILED: tuple[Event, ...] = (assignment(1), WorkersFailed("rank 0 failed"), WorkersGone())
COURSES_WITH_ENDS: dict[str, tuple[Any, ...]] = {
    "ranks start the workers": ((assignment(4),), Phase.RUNNING, Start(assignment(4))),
    "a failure is reported at once and stops the others": (
        (*RUNNING, WorkersFailed("rank 1 failed")),
        Phase.STOPPING,
        ReportFailed(0),
        StopWorkers("rank 1 failed"),
    ),
    "success is reported and waits for the outcome": (WAITING, Phase.WAITING, ReportSucceeded(0)),
    "the end of a round stops its workers": ((*RUNNING, AGAIN), Phase.STOPPING, StopWorkers(AGAIN.why)),
    "the end of the job stops its workers": ((*RUNNING, BADLY), Phase.STOPPING, StopWorkers(BADLY.why)),
    "a signal stops the workers and the node leaves": (
        (*RUNNING, SIGNAL),
        Phase.STOPPING,
        LeaveJob("signal 15", 0),
        StopWorkers("signal 15", TERM),
    ),
    "gone before the round ended: wait": ((*STOPPING, WorkersGone()), Phase.WAITING, ReportStopped(0)),
    "gone after a restart was granted: join": (
        (*STOPPING, AGAIN, WorkersGone()),
        Phase.JOINING,
        ReportStopped(0),
        AskForRanks(),
    ),
    "gone after a restart was refused: wait": ((*STOPPING, NO_MORE, WorkersGone()), Phase.WAITING, ReportStopped(0)),
    "gone after the end of the job: finish": (
        (*STOPPING, BADLY, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, BADLY.why, final=BADLY),
    ),
    "gone after a signal: finish with it": (
        (*RUNNING, SIGNAL, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, "signal 15", SIGNAL),
    ),
    "the end of a round stops nobody twice": ((*STOPPING, AGAIN), Phase.STOPPING),
    "a restart that is granted late: join": (
        (*STOPPING, WorkersGone(), AGAIN),
        Phase.JOINING,
        ReportStopped(0),
        AskForRanks(),
    ),
    "a success is repeated when a peer failed": ((*WAITING, AGAIN), Phase.JOINING, ReportStopped(0), AskForRanks()),
    "a round without a restart: wait for the end of the job": ((*WAITING, NO_MORE), Phase.WAITING, ReportStopped(0)),
    "success of the job": ((*WAITING, WELL), Phase.DONE, Finish(True, WELL.why, final=WELL, results=True)),
    "failure of the job": ((*WAITING, BADLY), Phase.DONE, Finish(False, BADLY.why, final=BADLY)),
    "success of the job without ranks": ((WELL,), Phase.DONE, Finish(True, WELL.why, final=WELL)),
    "a signal while joining": (
        (SIGNAL,),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", SIGNAL, has_run=False),
    ),
    "a signal while waiting": (
        (*WAITING, SIGNAL),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", SIGNAL),
    ),
    "a signal while workers stop stops nobody twice": ((*STOPPING, SIGNAL), Phase.STOPPING, LeaveJob("signal 15", 0)),
    "a signal beats a restart that was granted": (
        (*STOPPING, AGAIN, SIGNAL, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, "signal 15", SIGNAL),
    ),
    "a signal beats a success of the job meanwhile": (
        (*RUNNING, SIGNAL, WELL, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, WELL.why, SIGNAL, WELL),
    ),
    "new ranks forget the end of the former round": (
        (*STOPPING, AGAIN, WorkersGone(), *SECOND_FAILED),
        Phase.WAITING,
        ReportStopped(1),
    ),
    "new ranks forget that contact was lost": (
        (*RUNNING, LOST, WorkersGone(), *SECOND_FAILED),
        Phase.WAITING,
        ReportStopped(1),
    ),
    "lost contact stops the workers within its own grace": (
        (*RUNNING, LOST),
        Phase.STOPPING,
        StopWorkers(LOST.why, grace=1.5),
    ),
    "lost contact stops nobody twice": ((*STOPPING, LOST), Phase.STOPPING),
    "lost contact while running: join once they are gone": (
        (*RUNNING, LOST, WorkersGone()),
        Phase.JOINING,
        ReportStopped(0),
        AskForRanks(),
    ),
    "contact lost twice": ((*RUNNING, LOST, LOST, WorkersGone()), Phase.JOINING, ReportStopped(0), AskForRanks()),
    "lost contact while stopping": ((*STOPPING, LOST, WorkersGone()), Phase.JOINING, ReportStopped(0), AskForRanks()),
    "lost contact after a restart was refused": (
        (*STOPPING, NO_MORE, LOST, WorkersGone()),
        Phase.JOINING,
        ReportStopped(0),
        AskForRanks(),
    ),
    "lost contact while a failure waits for the outcome": (
        (*STOPPING, WorkersGone(), LOST),
        Phase.JOINING,
        AskForRanks(),
    ),
    "lost contact while joining": ((LOST,), Phase.JOINING, AskForRanks()),
    "a stop by the program has its reason and grace": (
        (*RUNNING, REQUEST),
        Phase.STOPPING,
        LeaveJob("the program said so", 0),
        StopWorkers("the program said so", TERM, 2.5),
    ),
    "a stop by the program ends with its reason": (
        (*RUNNING, REQUEST, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, "the program said so", REQUEST),
    ),
    "lost contact changes no end by a signal": (
        (*RUNNING, SIGNAL, LOST, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, "signal 15", SIGNAL),
    ),
    "lost contact changes no end of the job": (
        (*RUNNING, BADLY, LOST, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, BADLY.why, final=BADLY),
    ),
    "stopped for the success of others: no results": (
        (*RUNNING, LATER, WorkersGone()),
        Phase.DONE,
        ReportStopped(0),
        Finish(True, LATER.why, final=LATER),
    ),
    "a success that the stop finds is reported": ((*STOPPING, ENDED_WELL), Phase.WAITING, ReportSucceeded(0)),
    "others lost the store: a failure": ((*WAITING, WorkerStoreLost()), Phase.WAITING, ReportFailed(0)),
    "others lost the store, reported again to the next sidecar": (
        (*WAITING, WorkerStoreLost(), LOST, WorkerStoreLost()),
        Phase.JOINING,
        ReportFailed(0),
    ),
}
"""By rule: a course of events, the phase to which it leads, and the actions of its last event."""


POLLED = StopRequested(TERM, is_polled=True)
COMMON_STOP = StopAsked(0, "signal 15", 30.0, 0, 2)
PROPOSED = StopProposed(0, 7)
AGREED = StopAgreed(0)
LEAVING: tuple[Event, ...] = (*RUNNING, POLLED, COMMON_STOP, PROPOSED, AGREED)
"""This node must end, and its workers know their last call."""
HELPING: tuple[Event, ...] = (*RUNNING, COMMON_STOP, PROPOSED, AGREED)
"""Another node must end."""
RETURNED = WorkersSucceeded(stopped=True)
STOPS: dict[str, tuple[Any, ...]] = {
    "workers that ask are not stopped at once": ((*RUNNING, POLLED), Phase.RUNNING, WantStop(POLLED)),
    "they are asked when all nodes are": ((*RUNNING, POLLED, COMMON_STOP), Phase.RUNNING, AskWorkers(COMMON_STOP)),
    "so are those of other nodes": ((*RUNNING, COMMON_STOP), Phase.RUNNING, AskWorkers(COMMON_STOP)),
    "one request is enough": ((*RUNNING, COMMON_STOP, COMMON_STOP), Phase.RUNNING),
    "a request for another round is late": ((*RUNNING, StopAsked(1, "", 1.0, 0, 1)), Phase.RUNNING),
    "workers wait in the proposed call": ((*RUNNING, POLLED, COMMON_STOP, PROPOSED), Phase.RUNNING, Propose(7)),
    "a proposal without a request is late": ((*RUNNING, PROPOSED), Phase.RUNNING),
    "all return in it once it is agreed": (LEAVING, Phase.RUNNING, Agree()),
    "an agreement without a request is late": ((*RUNNING, AGREED), Phase.RUNNING),
    "once they have returned, the node leaves, preempted": (
        (*LEAVING, RETURNED),
        Phase.DONE,
        LeaveJob("signal 15", 0),
        ReportStopped(0),
        Finish(False, "signal 15", POLLED, saved=True),
    ),
    "the others say that their work is not done": ((*HELPING, RETURNED), Phase.WAITING, ReportStopped(0)),
    "and join the next round": ((*HELPING, RETURNED, AGAIN), Phase.JOINING, ReportStopped(0), AskForRanks()),
    "the end of the round waits for workers that save": ((*HELPING, AGAIN), Phase.RUNNING),
    "they join once they have saved": ((*HELPING, AGAIN, RETURNED), Phase.JOINING, ReportStopped(0), AskForRanks()),
    "the end of the job waits, too": ((*HELPING, BADLY), Phase.RUNNING),
    "it comes once they have saved": (
        (*HELPING, BADLY, RETURNED),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, BADLY.why, final=BADLY, saved=True),
    ),
    "a preempted node that hears of the end is preempted": (
        (*LEAVING, BADLY, RETURNED),
        Phase.DONE,
        LeaveJob("signal 15", 0),
        ReportStopped(0),
        Finish(False, BADLY.why, POLLED, BADLY, saved=True),
    ),
    "before they agree, the end of the round stops them": (
        (*RUNNING, COMMON_STOP, AGAIN),
        Phase.STOPPING,
        StopWorkers(AGAIN.why),
    ),
    "who still runs near the deadline gets the signal": (
        (*LEAVING, StopDue(5.0)),
        Phase.STOPPING,
        LeaveJob("signal 15", 0),
        StopWorkers("signal 15", TERM, 5.0),
    ),
    "also if no other node has answered": (
        (*RUNNING, POLLED, StopDue(5.0)),
        Phase.STOPPING,
        LeaveJob("signal 15", 0),
        StopWorkers("signal 15", TERM, 5.0),
    ),
    "who still runs after the end of the round is stopped": (
        (*HELPING, AGAIN, StopDue(5.0)),
        Phase.STOPPING,
        StopWorkers(AGAIN.why, grace=5.0),
    ),
    "who helped in vain goes on": ((*HELPING, StopDue(5.0)), Phase.RUNNING),
    "until the round ends": ((*HELPING, StopDue(5.0), AGAIN), Phase.STOPPING, StopWorkers(AGAIN.why)),
    "a second Ctrl-C waits for no step": (
        (*RUNNING, StopRequested(INT, is_polled=True), StopRequested(INT, is_polled=True)),
        Phase.STOPPING,
        LeaveJob("signal 2", 0),
        StopWorkers("signal 2", INT),
    ),
    "a second SIGTERM changes nothing": ((*LEAVING, POLLED), Phase.RUNNING),
    "a signal after the workers have saved is a preemption": (
        (*HELPING, RETURNED, SIGNAL),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", SIGNAL, saved=True),
    ),
    "workers that had finished before have succeeded": (
        (*LEAVING, WorkersSucceeded()),
        Phase.WAITING,
        ReportSucceeded(0),
    ),
    "and so has the job": (
        (*LEAVING, WorkersSucceeded(), WELL),
        Phase.DONE,
        Finish(True, WELL.why, POLLED, WELL, results=True),
    ),
    "unless the round is repeated": (
        (*LEAVING, WorkersSucceeded(), AGAIN),
        Phase.DONE,
        LeaveJob("signal 15"),
        ReportStopped(0),
        Finish(False, "signal 15", POLLED),
    ),
    "or contact is lost": (
        (*LEAVING, WorkersSucceeded(), LOST),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", POLLED),
    ),
    "a second Ctrl-C does not wait for others either": (
        (*RUNNING, StopRequested(INT, is_polled=True), WorkersSucceeded(), StopRequested(INT)),
        Phase.DONE,
        LeaveJob("signal 2"),
        Finish(False, "signal 2", StopRequested(INT, is_polled=True)),
    ),
    "a failure stops all, whatever was agreed": (
        (*LEAVING, WorkersFailed("rank 1 failed")),
        Phase.STOPPING,
        ReportFailed(0),
        LeaveJob("signal 15", 0),
        StopWorkers("rank 1 failed"),
    ),
    "so does the end of the round before they agree, and the node leaves": (
        (*RUNNING, POLLED, COMMON_STOP, AGAIN),
        Phase.STOPPING,
        LeaveJob("signal 15", 0),
        StopWorkers(AGAIN.why),
    ),
    "who had finished waits for the others until its time is over": (
        (*LEAVING, WorkersSucceeded(), StopDue(5.0)),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", POLLED),
    ),
}
"""The same for workers whose program asks whether it should stop."""


ENDS_JOB = StopRequested(TERM, "stopped by hand", ends_job=True)
STOPS |= {
    "a stop of the whole job says so": (
        (*RUNNING, ENDS_JOB),
        Phase.STOPPING,
        LeaveJob("stopped by hand", 0, ends_job=True),
        StopWorkers("stopped by hand", TERM),
    ),
    "a stop of the whole job after one of the node ends the job": (
        (*LEAVING, ENDS_JOB),
        Phase.RUNNING,
        CloseJob("stopped by hand"),
    ),
    "it is the reason of the end": (
        (*LEAVING, ENDS_JOB, RETURNED),
        Phase.DONE,
        LeaveJob("stopped by hand", 0, ends_job=True),
        ReportStopped(0),
        Finish(False, "stopped by hand", ENDS_JOB, saved=True),
    ),
    "it ends the job while workers stop": ((*RUNNING, SIGNAL, ENDS_JOB), Phase.STOPPING, CloseJob("stopped by hand")),
    "it is repeated in vain": ((*RUNNING, ENDS_JOB, ENDS_JOB), Phase.STOPPING),
    "a second request may leave less time": (
        (*LEAVING, StopRequested(TERM, "hurry", grace=1.0)),
        Phase.RUNNING,
        AwaitReturn(1.0),
    ),
    "workers that save keep on when contact is lost, as long as their ranks are their own": (
        (*LEAVING, LOST),
        Phase.STOPPING,
        StopWorkers(LOST.why, grace=LOST.grace, spares=True),
    ),
}
USR1 = int(signal.SIGUSR1)
NOTICE = StopRequested(USR1, is_notice=True, is_handled=True, worker_signum=TERM)
NOTICED: tuple[Event, ...] = (*RUNNING, NOTICE)
ENDING = StopRequested(TERM, is_notice=True)
STOPS |= {
    "workers that handle a notice go on": (NOTICED, Phase.RUNNING, AwaitReturn()),
    "they have the time that it leaves": (
        (*RUNNING, evolve(NOTICE, grace=90.0)),
        Phase.RUNNING,
        AwaitReturn(90.0),
    ),
    "once they have returned, the node leaves, preempted, too": (
        (*NOTICED, RETURNED),
        Phase.DONE,
        LeaveJob("signal 10", 0),
        ReportStopped(0),
        Finish(False, "signal 10", NOTICE, saved=True),
    ),
    "the end of the round waits for them, but not longer than usual": ((*NOTICED, AGAIN), Phase.RUNNING, AwaitReturn()),
    "so does the end of the job": ((*NOTICED, BADLY), Phase.RUNNING, AwaitReturn()),
    "a failure of another node stops them at once": (
        (*NOTICED, evolve(AGAIN, failed=True)),
        Phase.STOPPING,
        StopWorkers(AGAIN.why),
    ),
    "until their time is over": ((*NOTICED, AGAIN, StopDue(5.0)), Phase.STOPPING, StopWorkers(AGAIN.why, grace=5.0)),
    "after that a notice has no meaning": ((*NOTICED, StopDue(5.0), AGAIN), Phase.STOPPING, StopWorkers(AGAIN.why)),
    "a failure of one that handles it is a failure": (
        (*NOTICED, WorkersFailed("rank 1 failed")),
        Phase.STOPPING,
        ReportFailed(0),
        StopWorkers("rank 1 failed"),
    ),
    "a signal after the notice stops them": (
        (*NOTICED, SIGNAL),
        Phase.STOPPING,
        LeaveJob("signal 15", 0),
        StopWorkers("signal 15", TERM),
    ),
    "a notice that no worker has is late": ((*RUNNING, WorkersSucceeded(), NOTICE), Phase.WAITING),
    "a notice that workers ask for ends them by SIGTERM": (
        (*RUNNING, StopRequested(USR1, is_notice=True, is_polled=True, worker_signum=TERM), StopDue(5.0)),
        Phase.STOPPING,
        LeaveJob("signal 10", 0),
        StopWorkers("signal 10", TERM, 5.0),
    ),
    "a node that waits for its first ranks loses nothing": (
        (ENDING,),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", ENDING, saved=True, has_run=False),
    ),
    "one that waits for others does, as its workers have failed": (
        (*RUNNING, WorkersFailed("rank 1 failed"), WorkersGone(), AGAIN, ENDING),
        Phase.DONE,
        LeaveJob("signal 15"),
        Finish(False, "signal 15", ENDING),
    ),
    "workers that end well by their own handler have saved": (
        (*RUNNING, ENDING, WorkersGone(saved=True)),
        Phase.DONE,
        ReportStopped(0),
        Finish(False, "signal 15", ENDING, saved=True),
    ),
}
"""The same for announcements of the node's end."""


@pytest.mark.parametrize("rule", STOPS)
def test_requested_stop_ends_in_phase_with_actions(rule: str) -> None:
    course, phase, *actions = STOPS[rule]

    state, last = after(*course)

    assert (phase, tuple(actions)) == (state.phase, last)


@pytest.mark.parametrize("rule", COURSES_WITH_ENDS)
def test_course_ends_in_phase_with_actions(rule: str) -> None:
    course, phase, *actions = COURSES_WITH_ENDS[rule]

    state, last = after(*course)

    assert (phase, tuple(actions)) == (state.phase, last)


@pytest.mark.parametrize("course", [(LOST,), (LOST, LOST), (RoundEnd(0, "the last one came too late", restart=True),)])
def test_new_request_after_success_keeps_the_results_of_that_round(
    course: tuple[Event, ...],
) -> None:
    _, actions = after(*WAITING, *course, WELL)

    assert actions == (Finish(True, WELL.why, final=WELL, results=True),)


@pytest.mark.parametrize("course", [(LOST,), (AGAIN,), (LOST, AGAIN)])
def test_success_replaced_by_a_later_round_is_not_a_success(course: tuple[Event, ...]) -> None:
    """Its results do not count and it has no others: the caller must hear of that."""
    _, actions = after(*WAITING, *course, LATER)

    (finish,) = actions
    assert isinstance(finish, Finish)
    assert (False, False, LATER) == (finish.succeeded, finish.results, finish.final)
    assert "the results of round 0 were discarded: all succeeded in round 1 without this node" == finish.why


@pytest.mark.parametrize(
    "course",
    [
        (),
        (*STOPPING, AGAIN, WorkersGone()),
        (*RUNNING, LOST, WorkersGone()),
        (*WAITING, LOST, assignment(1), LOST, WorkersGone()),
    ],
    ids=["a spare", "failed", "cut off", "began a later round"],
)
@pytest.mark.parametrize("final", [WELL, LATER])
def test_node_without_reported_success_in_last_round_has_no_results(course: tuple[Event, ...], final: Final) -> None:
    _, actions = after(*course, final)

    assert actions == (Finish(True, final.why, final=final, results=False),)


def test_a_second_signal_changes_nothing() -> None:
    once, _ = after(*RUNNING, StopRequested(TERM))

    state, actions = step(once, StopRequested(int(signal.SIGINT)))

    assert (state, actions) == (once, ())


@pytest.mark.parametrize("course", [(*WAITING, LOST), (*WAITING, LOST, LOST), (*RUNNING, LOST, ENDED_WELL)])
def test_success_is_reported_again_before_ranks_are_requested(course: tuple[Event, ...]) -> None:
    """The receiver may have exited, so the first report may be lost."""
    state, actions = after(*course)

    assert (state.phase, actions) == (Phase.JOINING, (ReportSucceeded(0), AskForRanks()))
    assert step(state, WELL)[1] == (Finish(True, WELL.why, final=WELL, results=True),)


@pytest.mark.parametrize("event", [StopRequested(TERM), LATER])
def test_success_that_arrives_after_the_end_changes_nothing(event: Event) -> None:
    assert after(*RUNNING, event, ENDED_WELL) == after(*RUNNING, event, WorkersGone())


@pytest.mark.parametrize(
    ("course", "event"),
    [
        ((), WorkersFailed("late")),
        (DONE, LOST),
        ((), WorkersSucceeded()),
        ((), WorkersGone()),
        ((), AGAIN),
        (RUNNING, assignment(1)),
        (RUNNING, WorkersGone()),
        (RUNNING, RoundEnd(7, "of another round", restart=True)),
        (STOPPING, assignment(1)),
        (STOPPING, WorkersFailed("another one")),
        (STOPPING, WorkersSucceeded()),
        (STOPPING, RoundEnd(7, "of another round", restart=True)),
        (WAITING, assignment(1)),
        (WAITING, WorkersFailed("late")),
        (WAITING, WorkersSucceeded()),
        (WAITING, WorkersGone()),
        (WAITING, RoundEnd(7, "of another round", restart=True)),
        (DONE, assignment(1)),
        (DONE, WorkersFailed("late")),
        (DONE, WorkersSucceeded()),
        (DONE, WorkersGone()),
        (DONE, AGAIN),
        (DONE, BADLY),
        (DONE, StopRequested(TERM)),
    ],
)
def test_event_that_does_not_concern_the_phase_changes_nothing(course: tuple[Event, ...], event: Event) -> None:
    before, _ = after(*course)

    state, actions = step(before, event)

    assert (state, actions) == (before, ())


ROUNDS = st.integers(0, 2)


@pytest.mark.parametrize(
    "course",
    [
        (*WAITING, STORE_LOST),
        (*WAITING, LOST, STORE_LOST),
        (*RUNNING, STORE_LOST, WorkersSucceeded()),
        (*RUNNING, LOST, STORE_LOST, ENDED_WELL),
    ],
    ids=["told", "told, and then cut off", "in the same moment", "cut off in the same moment"],
)
def test_work_that_succeeded_is_not_failed_by_a_store_that_went(course: tuple[Event, ...]) -> None:
    state, actions = after(*course)

    *_, finish = actions
    assert isinstance(finish, Finish)
    assert (True, True, None) == (finish.succeeded, finish.results, finish.final)
    assert (Phase.DONE, True) == (state.phase, STORE_LOST.why in finish.why)


@pytest.mark.parametrize(
    "course",
    [(), RUNNING, STOPPING, (*WAITING, AGAIN), (*WAITING, NO_MORE), (*WAITING, AGAIN, assignment(1))],
    ids=["nothing begun", "at work", "failed", "to be repeated", "in vain", "being repeated"],
)
def test_a_store_that_went_makes_no_success_of_what_is_none(course: tuple[Event, ...]) -> None:
    """The error of the rendezvous follows, and says it."""
    state, actions = after(*course, STORE_LOST)

    assert () == actions
    assert state.phase is not Phase.DONE


def test_store_lost_by_other_nodes_is_reported_as_failure_once() -> None:
    state, actions = after(*WAITING, WorkerStoreLost())

    assert (ReportFailed(0),) == actions
    assert step(state, WorkerStoreLost()) == (state, ())
    assert state.succeeded, "and if the others succeed all the same, so has the job"


@pytest.mark.parametrize("course", [RUNNING, (*WAITING, AGAIN), (*WAITING, NO_MORE)], ids=["at work", "again", "over"])
def test_lost_store_is_not_reported_when_no_node_needs_the_store(course: tuple[Event, ...]) -> None:
    state, _ = after(*course)

    assert step(state, WorkerStoreLost()) == (state, ())


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(assignment, ROUNDS),
    st.builds(WorkersFailed, st.just("failed")),
    st.builds(WorkersSucceeded, st.booleans()),
    st.builds(StopAsked, ROUNDS, st.just("signal 15"), st.just(30.0), st.just(0), st.just(2)),
    st.builds(StopProposed, ROUNDS, st.just(7)),
    st.builds(StopAgreed, ROUNDS),
    st.just(StopDue(5.0)),
    st.builds(WorkersGone, st.booleans()),
    st.builds(RoundEnd, ROUNDS, st.just("ended"), st.booleans()),
    st.builds(Final, st.booleans(), st.just("over"), round=st.none() | ROUNDS),
    st.just(LOST),
    st.just(STORE_LOST),
    st.just(WorkerStoreLost()),
    st.builds(StopRequested, st.sampled_from([TERM, INT]), is_polled=st.booleans()),
    st.builds(StopRequested, st.just(TERM), st.just("the program said so"), st.none() | st.floats(0, 60)),
)
COURSES = st.lists(EVENTS, max_size=25)


def trace(course: list[Event]) -> list[tuple[AgentState, Event | None, tuple[Action, ...]]]:
    """(state before, event, actions) of each step, with the beginning first."""
    state, actions = _policy.begin()
    steps: list[tuple[AgentState, Event | None, tuple[Action, ...]]] = [(state, None, actions)]
    for event in course:
        before = state
        state, actions = step(state, event)
        steps.append((before, event, actions))
    return steps


def all_actions(course: list[Event]) -> list[Action]:
    return [action for _, _, actions in trace(course) for action in actions]


def test_a_state_remembers_what_took_it_from_phase_to_phase() -> None:
    state, _ = after(*STOPPING, AGAIN, WorkersGone())

    assert (
        "joining to running: RankAssignment all nodes are there",
        "running to stopping: WorkersFailed rank 1 failed",
        "stopping to joining: WorkersGone",
    ) == state.story


def test_a_step_that_the_table_lacks_is_an_error_with_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = after(*RUNNING)
    monkeypatch.setitem(_policy.NEXT, Phase.RUNNING, frozenset())

    with pytest.raises(InvalidTransitionError, match="round 0 cannot go from running to waiting") as caught:
        step(state, WorkersSucceeded())

    assert (*state.story, "WorkersSucceeded") == caught.value.story


def test_every_line_of_the_table_is_some_course() -> None:
    """Else the picture shows what cannot be."""
    courses: list[list[Event]] = [
        [WELL],
        [*STOPPING, WorkersGone(), AGAIN, assignment(1), STORE_LOST, WorkersSucceeded()],
        [*STOPPING, AGAIN, WorkersGone()],
        [*STOPPING, BADLY, WorkersGone()],
        [*WAITING, AGAIN],
        [*WAITING, WELL],
        [*HELPING, AGAIN, RETURNED],
    ]
    states = [[_policy.begin()[0], *(after(*course[: n + 1])[0] for n in range(len(course)))] for course in courses]
    seen = {(one.phase, other.phase) for course in states for one, other in itertools.pairwise(course)}

    assert {(start, finish) for start, ends in _policy.NEXT.items() for finish in ends} <= seen


@given(COURSES)
def test_end_of_all_workers_is_reported_between_two_starts(course: list[Event]) -> None:
    reports = (ReportStopped, ReportSucceeded)
    kinds = [type(each) for each in all_actions(course) if isinstance(each, (Start, *reports))]

    assert (Start, Start) not in list(itertools.pairwise(kinds))


@given(COURSES)
def test_each_start_answers_a_join_of_its_own(course: list[Event]) -> None:
    kinds = [type(each) for each in all_actions(course) if isinstance(each, (AskForRanks, Start))]

    assert [AskForRanks] == kinds[:1]
    assert (Start, Start) not in list(itertools.pairwise(kinds))


@given(COURSES)
def test_nothing_is_done_after_the_end(course: list[Event]) -> None:
    actions = all_actions(course)
    ends = [place for place, action in enumerate(actions) if isinstance(action, Finish)]

    assert ends in ([], [len(actions) - 1])


@given(COURSES)
def test_after_a_signal_nothing_is_joined_or_started(course: list[Event]) -> None:
    requested = [isinstance(event, StopRequested) for _, event, _ in trace(course)]
    from_then_on = trace(course)[requested.index(True) :] if True in requested else []

    assert not [each for _, _, actions in from_then_on for each in actions if isinstance(each, (AskForRanks, Start))]


@given(COURSES)
def test_running_workers_are_stopped_for_every_event_but_their_success(course: list[Event]) -> None:
    for before, event, actions in trace(course):
        if before.phase is Phase.RUNNING:
            stops = [action for action in actions if isinstance(action, StopWorkers)]
            assert len(stops) == stops_workers(before, event)


def stops_workers(before: AgentState, event: Event | None) -> bool:
    """Return whether *event* stops running workers."""
    match event:
        case WorkersFailed() | ContactLost():
            return True
        case RoundEnd(number):
            return number == before.round and not before.agreed
        case Final():
            return not before.agreed
        case StopRequested(signum, reason, is_polled=is_polled):
            return not is_polled if before.stop is None else (signum == INT and not reason)
        case StopDue():
            return bool(before.stop or before.end or before.final)
        case _:
            return False


@given(COURSES)
def test_workers_are_stopped_only_while_they_run(course: list[Event]) -> None:
    for before, _, actions in trace(course):
        assert before.phase is Phase.RUNNING or not [each for each in actions if isinstance(each, StopWorkers)]


@given(COURSES)
def test_failure_is_reported_before_the_slow_stop_of_workers(course: list[Event]) -> None:
    for before, event, actions in trace(course):
        if before.phase is Phase.RUNNING and isinstance(event, WorkersFailed):
            kinds = [type(action) for action in actions if not isinstance(action, LeaveJob)]
            assert kinds == [ReportFailed, StopWorkers]


@given(COURSES)
def test_reports_speak_of_the_round_of_the_last_start(course: list[Event]) -> None:
    started = -1
    for action in all_actions(course):
        if isinstance(action, Start):
            started = action.assignment.round
        elif isinstance(action, (ReportFailed, ReportStopped, ReportSucceeded)):
            assert action.round == started


@given(COURSES)
def test_run_succeeds_only_by_the_coordinator_or_after_its_loss(
    course: list[Event],
) -> None:
    for before, event, actions in trace(course):
        for action in actions:
            if isinstance(action, Finish) and action.succeeded:
                final = event if isinstance(event, Final) else before.final
                if final is None:
                    assert before.gone or isinstance(event, StoreGone)
                    # Workers that are being stopped may all have ended well before the stop reached any.
                    assert before.succeeded or event in (WorkersSucceeded(), WorkersGone(succeeded=True))
                    assert before.end is None
                else:
                    assert final.succeeded
                assert action.stop is None and before.stop is None


@given(COURSES)
def test_reported_success_is_followed_by_results_or_by_no_success(course: list[Event]) -> None:
    reported_round = None
    for action in all_actions(course):
        if isinstance(action, Start):
            reported_round = None
        elif isinstance(action, ReportSucceeded):
            reported_round = action.round
        elif isinstance(action, Finish) and reported_round is not None:
            assert action.results == action.succeeded
            assert not action.results or action.final is None or action.final.round == reported_round


@given(COURSES)
def test_from_everywhere_the_end_of_the_job_and_of_the_workers_finishes(course: list[Event]) -> None:
    actions = all_actions([*course, BADLY, WorkersGone()])

    assert isinstance(actions[-1], Finish)


def test_each_event_has_a_reaction() -> None:
    assert set(get_args(Event)) == set(_policy._REACTIONS)
