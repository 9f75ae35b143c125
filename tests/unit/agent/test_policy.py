"""What an agent does about its workers: each line of the table, then what holds for any course of events."""

from __future__ import annotations

import itertools
import signal

import pytest
from hypothesis import given, strategies as st

from elasticlib.agent import _policy
from elasticlib.agent._policy import (
    Action,
    Event,
    Finish,
    Join,
    Leave,
    Phase,
    Start,
    State,
    Stop,
    StopRequested,
    TellFailed,
    TellStopped,
    TellSucceeded,
    WorkersFailed,
    WorkersGone,
    WorkersSucceeded,
    WorkerStoreLost,
    step,
)
from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous import ContactLost, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous.protocol._messages import StoreGone


def assignment(number: int = 0) -> RankAssignment:
    return RankAssignment(number, 0, 1, 0, 2, 0, 2, number, 3, ("127.0.0.1",), 29500, "all nodes are there")


AGAIN = RoundEnd(0, "rank 1 failed", restart=True)
NO_MORE = RoundEnd(0, "rank 1 failed; no restarts are allowed", restart=False)
WELL = Final(True, "all succeeded in round 0", round=0)
LATER = Final(True, "all succeeded in round 1", round=1)
BADLY = Final(False, "rank 1 failed")
LOST = ContactLost("no answer for 6 s", 1.5)
GONE = StoreGone("the host of the job's store is gone")
TERM = int(signal.SIGTERM)


def after(*events: Event) -> tuple[State, tuple[Action, ...]]:
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

    assert state.phase is Phase.JOINING
    assert actions == (Join(),)


def test_ranks_start_the_workers() -> None:
    state, actions = after(assignment(4))

    assert (state.phase, state.round) == (Phase.RUNNING, 4)
    assert actions == (Start(assignment(4)),)


def test_a_failure_is_told_at_once_and_stops_the_other_workers() -> None:
    state, actions = after(*RUNNING, WorkersFailed("rank 1 failed"))

    assert state.phase is Phase.STOPPING
    assert actions == (TellFailed(0), Stop("rank 1 failed"))


def test_success_is_told_and_the_agent_waits_for_the_word() -> None:
    state, actions = after(*RUNNING, WorkersSucceeded())

    assert state.phase is Phase.WAITING
    assert actions == (TellSucceeded(0),)


def test_the_end_of_a_round_stops_its_workers() -> None:
    state, actions = after(*RUNNING, AGAIN)

    assert state.phase is Phase.STOPPING
    assert actions == (Stop(AGAIN.why),)


def test_the_end_of_the_job_stops_workers_that_still_run() -> None:
    state, actions = after(*RUNNING, BADLY)

    assert state.phase is Phase.STOPPING
    assert actions == (Stop(BADLY.why),)


def test_a_signal_is_passed_on_to_the_workers_and_the_node_leaves_with_their_round() -> None:
    state, actions = after(*RUNNING, StopRequested(TERM))

    assert state.phase is Phase.STOPPING
    assert actions == (Leave("signal 15", 0), Stop("signal 15", TERM))


def test_workers_that_are_gone_before_the_word_came_make_the_agent_wait_for_it() -> None:
    state, actions = after(*STOPPING, WorkersGone())

    assert state.phase is Phase.WAITING
    assert actions == (TellStopped(0),)


def test_workers_that_are_gone_after_a_restart_was_granted_make_the_agent_join() -> None:
    state, actions = after(*STOPPING, AGAIN, WorkersGone())

    assert state.phase is Phase.JOINING
    assert actions == (TellStopped(0), Join())


def test_workers_that_are_gone_after_a_restart_was_refused_make_the_agent_wait_for_the_end() -> None:
    state, actions = after(*STOPPING, NO_MORE, WorkersGone())

    assert state.phase is Phase.WAITING
    assert actions == (TellStopped(0),)


def test_workers_that_are_gone_after_the_end_of_the_job_finish_the_run() -> None:
    state, actions = after(*STOPPING, BADLY, WorkersGone())

    assert state.phase is Phase.DONE
    assert actions == (TellStopped(0), Finish(False, BADLY.why, final=BADLY))


def test_workers_that_are_gone_after_a_signal_finish_the_run_with_it() -> None:
    state, actions = after(*RUNNING, StopRequested(TERM), WorkersGone())

    assert state.phase is Phase.DONE
    assert actions == (TellStopped(0), Finish(False, "signal 15", StopRequested(TERM)))


def test_the_word_on_the_round_does_not_stop_workers_twice() -> None:
    state, actions = after(*STOPPING, AGAIN)

    assert state.phase is Phase.STOPPING
    assert actions == ()


def test_a_restart_that_is_granted_late_makes_the_agent_join() -> None:
    state, actions = after(*STOPPING, WorkersGone(), AGAIN)

    assert state.phase is Phase.JOINING
    assert actions == (TellStopped(0), Join())


def test_a_node_that_succeeded_runs_again_when_a_peer_failed() -> None:
    state, actions = after(*WAITING, AGAIN)

    assert state.phase is Phase.JOINING
    assert actions == (TellStopped(0), Join())


def test_a_round_without_a_restart_leaves_the_agent_waiting_for_the_end_of_the_job() -> None:
    state, actions = after(*WAITING, NO_MORE)

    assert state.phase is Phase.WAITING
    assert actions == (TellStopped(0),)


@pytest.mark.parametrize(("final", "succeeded"), [(WELL, True), (BADLY, False)])
def test_the_end_of_the_job_is_the_coordinators_word(final: Final, succeeded: bool) -> None:
    state, actions = after(*WAITING, final)

    assert state.phase is Phase.DONE
    assert actions == (Finish(succeeded, final.why, final=final, results=succeeded),)


@pytest.mark.parametrize("course", [(LOST,), (LOST, LOST), (RoundEnd(0, "the last one came too late", restart=True),)])
def test_who_asked_for_another_seat_after_its_success_still_has_the_results_of_the_round_that_succeeded(
    course: tuple[Event, ...],
) -> None:
    _, actions = after(*WAITING, *course, WELL)

    assert actions == (Finish(True, WELL.why, final=WELL, results=True),)


@pytest.mark.parametrize("course", [(LOST,), (AGAIN,), (LOST, AGAIN)])
def test_a_told_success_that_a_later_round_without_this_node_replaced_is_no_success(course: tuple[Event, ...]) -> None:
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
def test_who_told_no_success_of_its_last_round_has_no_results(course: tuple[Event, ...], final: Final) -> None:
    _, actions = after(*course, final)

    assert actions == (Finish(True, final.why, final=final, results=False),)


def test_workers_that_are_stopped_for_the_success_of_others_have_no_results() -> None:
    _, actions = after(*RUNNING, LATER, WorkersGone())

    assert actions[-1] == Finish(True, LATER.why, final=LATER, results=False)


def test_an_agent_without_ranks_finishes_with_the_job() -> None:
    state, actions = after(WELL)

    assert state.phase is Phase.DONE
    assert actions == (Finish(True, WELL.why, final=WELL),)


@pytest.mark.parametrize("course", [(), WAITING], ids=["joining", "waiting"])
def test_a_signal_without_workers_finishes_at_once(course: tuple[Event, ...]) -> None:
    state, actions = after(*course, StopRequested(TERM))

    assert state.phase is Phase.DONE
    assert actions == (Leave("signal 15"), Finish(False, "signal 15", StopRequested(TERM)))


def test_a_signal_while_workers_stop_leaves_and_stops_nothing_twice() -> None:
    state, actions = after(*STOPPING, StopRequested(TERM))

    assert state.phase is Phase.STOPPING
    assert actions == (Leave("signal 15", 0),)


def test_a_signal_beats_a_restart_that_was_granted() -> None:
    state, actions = after(*STOPPING, AGAIN, StopRequested(TERM), WorkersGone())

    assert state.phase is Phase.DONE
    assert actions == (TellStopped(0), Finish(False, "signal 15", StopRequested(TERM)))


def test_a_signal_beats_a_success_that_is_told_while_workers_stop() -> None:
    _, actions = after(*RUNNING, StopRequested(TERM), WELL, WorkersGone())

    assert actions[-1] == Finish(False, WELL.why, StopRequested(TERM), WELL)


def test_a_second_signal_changes_nothing() -> None:
    once, _ = after(*RUNNING, StopRequested(TERM))

    state, actions = step(once, StopRequested(int(signal.SIGINT)))

    assert (state, actions) == (once, ())


def test_a_new_seat_forgets_the_word_on_the_former_round() -> None:
    state, actions = after(
        *STOPPING, AGAIN, WorkersGone(), assignment(1), WorkersFailed("rank 0 failed"), WorkersGone()
    )

    assert state.phase is Phase.WAITING
    assert actions == (TellStopped(1),)


def test_lost_contact_stops_the_workers_within_its_own_grace() -> None:
    state, actions = after(*RUNNING, LOST)

    assert state.phase is Phase.STOPPING
    assert actions == (Stop(LOST.why, grace=1.5),)


@pytest.mark.parametrize(
    "course",
    [
        (*RUNNING, LOST, WorkersGone()),
        (*RUNNING, LOST, LOST, WorkersGone()),
        (*STOPPING, LOST, WorkersGone()),
        (*STOPPING, NO_MORE, LOST, WorkersGone()),
    ],
)
def test_who_lost_contact_asks_for_a_new_seat_once_its_workers_are_gone(course: tuple[Event, ...]) -> None:
    state, actions = after(*course)

    assert state.phase is Phase.JOINING
    assert actions == (TellStopped(0), Join())


def test_workers_that_stop_already_are_not_stopped_again_for_lost_contact() -> None:
    state, actions = after(*STOPPING, LOST)

    assert state.phase is Phase.STOPPING
    assert actions == ()


def test_who_waits_for_the_word_on_its_failure_and_loses_contact_asks_for_a_new_seat() -> None:
    state, actions = after(*STOPPING, WorkersGone(), LOST)

    assert state.phase is Phase.JOINING
    assert actions == (Join(),)


def test_a_stop_that_the_program_asked_for_has_its_reason_and_its_grace() -> None:
    asked = StopRequested(TERM, "the program said so", 2.5)
    _, actions = after(*RUNNING, asked)
    assert actions == (Leave("the program said so", 0), Stop("the program said so", TERM, 2.5))

    _, actions = after(*RUNNING, asked, WorkersGone())
    assert actions == (TellStopped(0), Finish(False, "the program said so", asked))


@pytest.mark.parametrize(("event", "final"), [(StopRequested(TERM), None), (BADLY, BADLY)])
def test_lost_contact_changes_no_end_that_was_decided(event: Event, final: Final | None) -> None:
    state, actions = after(*RUNNING, event, LOST, WorkersGone())

    assert state.phase is Phase.DONE
    assert isinstance(actions[-1], Finish) and actions[-1].final == final


def test_a_new_seat_forgets_that_contact_was_lost() -> None:
    state, actions = after(*RUNNING, LOST, WorkersGone(), assignment(1), WorkersFailed("rank 0 failed"), WorkersGone())

    assert state.phase is Phase.WAITING
    assert actions == (TellStopped(1),)


ENDED_WELL = WorkersGone(succeeded=True)


@pytest.mark.parametrize("course", [(*WAITING, LOST), (*WAITING, LOST, LOST), (*RUNNING, LOST, ENDED_WELL)])
def test_success_is_told_again_before_ranks_are_asked_for(course: tuple[Event, ...]) -> None:
    """Whoever was told may have died with it."""
    state, actions = after(*course)

    assert (state.phase, actions) == (Phase.JOINING, (TellSucceeded(0), Join()))
    assert step(state, WELL)[1] == (Finish(True, WELL.why, final=WELL, results=True),)


def test_success_that_a_stop_finds_is_told() -> None:
    state, actions = after(*STOPPING, ENDED_WELL)

    assert (state.phase, state.succeeded, actions) == (Phase.WAITING, True, (TellSucceeded(0),))


@pytest.mark.parametrize("event", [StopRequested(TERM), LATER])
def test_success_that_comes_after_the_end_changes_nothing(event: Event) -> None:
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
def test_what_does_not_concern_a_phase_changes_nothing(course: tuple[Event, ...], event: Event) -> None:
    before, _ = after(*course)

    state, actions = step(before, event)

    assert (state, actions) == (before, ())


ROUNDS = st.integers(0, 2)


@pytest.mark.parametrize(
    "course",
    [
        (*WAITING, GONE),
        (*WAITING, LOST, GONE),
        (*RUNNING, GONE, WorkersSucceeded()),
        (*RUNNING, LOST, GONE, ENDED_WELL),
    ],
    ids=["told", "told, and then cut off", "in the same moment", "cut off in the same moment"],
)
def test_work_that_succeeded_is_not_failed_by_a_store_that_went(course: tuple[Event, ...]) -> None:
    state, actions = after(*course)

    *_, finish = actions
    assert isinstance(finish, Finish)
    assert (True, True, None) == (finish.succeeded, finish.results, finish.final)
    assert (Phase.DONE, True) == (state.phase, GONE.why in finish.why)


@pytest.mark.parametrize(
    "course",
    [(), RUNNING, STOPPING, (*WAITING, AGAIN), (*WAITING, NO_MORE), (*WAITING, AGAIN, assignment(1))],
    ids=["nothing begun", "at work", "failed", "to be repeated", "in vain", "being repeated"],
)
def test_a_store_that_went_makes_no_success_of_what_is_none(course: tuple[Event, ...]) -> None:
    """The error of the rendezvous follows, and says it."""
    state, actions = after(*course, GONE)

    assert () == actions
    assert state.phase is not Phase.DONE


def test_a_store_that_others_have_lost_is_a_failure_told_once() -> None:
    state, actions = after(*WAITING, WorkerStoreLost())

    assert (TellFailed(0),) == actions
    assert step(state, WorkerStoreLost()) == (state, ())
    assert state.succeeded, "and if the others succeed all the same, so has the job"


def test_a_store_that_others_have_lost_is_told_again_after_contact_was_lost() -> None:
    """The sidecar that was told of it may be gone."""
    _, actions = after(*WAITING, WorkerStoreLost(), LOST, WorkerStoreLost())

    assert (TellFailed(0),) == actions


@pytest.mark.parametrize("course", [RUNNING, (*WAITING, AGAIN), (*WAITING, NO_MORE)], ids=["at work", "again", "over"])
def test_a_store_that_nobody_misses_any_more_is_told_to_nobody(course: tuple[Event, ...]) -> None:
    state, _ = after(*course)

    assert step(state, WorkerStoreLost()) == (state, ())


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(assignment, ROUNDS),
    st.builds(WorkersFailed, st.just("failed")),
    st.just(WorkersSucceeded()),
    st.builds(WorkersGone, st.booleans()),
    st.builds(RoundEnd, ROUNDS, st.just("ended"), st.booleans()),
    st.builds(Final, st.booleans(), st.just("over"), round=st.none() | ROUNDS),
    st.just(LOST),
    st.just(GONE),
    st.just(WorkerStoreLost()),
    st.builds(StopRequested, st.sampled_from([TERM, int(signal.SIGINT)])),
    st.builds(StopRequested, st.just(TERM), st.just("the program said so"), st.none() | st.floats(0, 60)),
)
COURSES = st.lists(EVENTS, max_size=25)


def trace(course: list[Event]) -> list[tuple[State, Event | None, tuple[Action, ...]]]:
    """(state before, event, actions) of each step, with the beginning first."""
    state, actions = _policy.begin()
    steps: list[tuple[State, Event | None, tuple[Action, ...]]] = [(state, None, actions)]
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
        [*STOPPING, WorkersGone(), AGAIN, assignment(1), GONE, WorkersSucceeded()],
        [*STOPPING, AGAIN, WorkersGone()],
        [*STOPPING, BADLY, WorkersGone()],
        [*WAITING, AGAIN],
        [*WAITING, WELL],
    ]
    states = [[_policy.begin()[0], *(after(*course[: n + 1])[0] for n in range(len(course)))] for course in courses]
    seen = {(one.phase, other.phase) for course in states for one, other in itertools.pairwise(course)}

    assert {(start, finish) for start, ends in _policy.NEXT.items() for finish in ends} <= seen


@given(COURSES)
def test_between_two_starts_it_was_told_that_all_workers_are_gone(course: list[Event]) -> None:
    told = (TellStopped, TellSucceeded)
    kinds = [type(each) for each in all_actions(course) if isinstance(each, (Start, *told))]

    assert (Start, Start) not in list(itertools.pairwise(kinds))


@given(COURSES)
def test_each_start_answers_a_join_of_its_own(course: list[Event]) -> None:
    kinds = [type(each) for each in all_actions(course) if isinstance(each, (Join, Start))]

    assert [Join] == kinds[:1]
    assert (Start, Start) not in list(itertools.pairwise(kinds))


@pytest.mark.parametrize("course", [(), WAITING])
def test_whoever_waits_without_contact_asks_again(course: tuple[Event, ...]) -> None:
    """The others may have taken it for dead: it is on no list any more."""
    state, actions = after(*course, LOST)

    assert (Phase.JOINING, Join()) == (state.phase, actions[-1])


@given(COURSES)
def test_nothing_is_done_after_the_end(course: list[Event]) -> None:
    actions = all_actions(course)
    ends = [place for place, action in enumerate(actions) if isinstance(action, Finish)]

    assert ends in ([], [len(actions) - 1])


@given(COURSES)
def test_after_a_signal_nothing_is_joined_or_started(course: list[Event]) -> None:
    asked = [isinstance(event, StopRequested) for _, event, _ in trace(course)]
    from_then_on = trace(course)[asked.index(True) :] if True in asked else []

    assert not [each for _, _, actions in from_then_on for each in actions if isinstance(each, (Join, Start))]


@given(COURSES)
def test_running_workers_are_stopped_for_every_event_but_their_success(course: list[Event]) -> None:
    for before, event, actions in trace(course):
        if before.phase is Phase.RUNNING:
            stops = [action for action in actions if isinstance(action, Stop)]
            concerns = isinstance(event, (WorkersFailed, Final, ContactLost, StopRequested)) or (
                isinstance(event, RoundEnd) and event.round == before.round
            )
            assert len(stops) == concerns


@given(COURSES)
def test_workers_are_stopped_only_while_they_run(course: list[Event]) -> None:
    for before, _, actions in trace(course):
        assert before.phase is Phase.RUNNING or not [each for each in actions if isinstance(each, Stop)]


@given(COURSES)
def test_a_failure_is_told_before_the_stop_that_takes_time(course: list[Event]) -> None:
    for before, event, actions in trace(course):
        if before.phase is Phase.RUNNING and isinstance(event, WorkersFailed):
            assert [type(action) for action in actions] == [TellFailed, Stop]


@given(COURSES)
def test_reports_speak_of_the_round_of_the_last_start(course: list[Event]) -> None:
    started = -1
    for action in all_actions(course):
        if isinstance(action, Start):
            started = action.assignment.round
        elif isinstance(action, (TellFailed, TellStopped, TellSucceeded)):
            assert action.round == started


@given(COURSES)
def test_a_run_succeeds_only_by_the_coordinators_word_or_where_it_is_gone_and_without_a_signal(
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
def test_a_told_success_is_followed_by_results_or_by_no_success(course: list[Event]) -> None:
    told = None
    for action in all_actions(course):
        if isinstance(action, Start):
            told = None
        elif isinstance(action, TellSucceeded):
            told = action.round
        elif isinstance(action, Finish) and told is not None:
            assert action.results == action.succeeded
            assert not action.results or action.final is None or action.final.round == told


@given(COURSES)
def test_from_everywhere_the_end_of_the_job_and_of_the_workers_finishes(course: list[Event]) -> None:
    actions = all_actions([*course, BADLY, WorkersGone()])

    assert isinstance(actions[-1], Finish)
