"""Groups of workers, and the steps of their life cycle."""

from __future__ import annotations

import pickle

import pytest

from elasticlib.errors import InvalidTransitionError, ProcessFailure
from elasticlib.spec import WorkerSpec
from elasticlib.state import NEXT, RunResult, Worker, WorkerGroup, WorkerState


def spec(local_world_size: int = 2) -> WorkerSpec:
    return WorkerSpec("trainer", local_world_size, None, entrypoint="train.py")


@pytest.mark.parametrize("state", WorkerState)
def test_only_healthy_and_unhealthy_groups_run(state: WorkerState) -> None:
    """Row 167."""
    expected = state.value in ("HEALTHY", "UNHEALTHY")

    assert expected == WorkerState.is_running(state)


def test_a_state_is_its_name() -> None:
    assert WorkerState("HEALTHY") is WorkerState.HEALTHY
    assert WorkerState.HEALTHY == "HEALTHY"


def test_the_life_cycle_names_every_state() -> None:
    assert set(WorkerState) == set(NEXT)


def test_every_state_can_be_reached_from_init() -> None:
    reached = {WorkerState.INIT}
    while more := {after for state in reached for after in NEXT[state]} - reached:
        reached |= more

    assert set(WorkerState) == reached


def test_running_group_can_be_stopped_in_any_state() -> None:
    running = [state for state in WorkerState if WorkerState.is_running(state)]

    assert all(WorkerState.STOPPED in NEXT[state] for state in running)


def test_a_group_that_failed_is_stopped_before_anything_else() -> None:
    assert {WorkerState.STOPPED} == NEXT[WorkerState.FAILED]


def test_a_group_takes_the_steps_of_its_life() -> None:
    group = WorkerGroup(spec())
    for state in (WorkerState.HEALTHY, WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.STOPPED):
        group.step(state, "so it is")

        assert group.state is state


@pytest.mark.parametrize("finish", WorkerState)
@pytest.mark.parametrize("start", WorkerState)
def test_a_step_that_the_life_cycle_lacks_raises_with_the_steps_before(start: WorkerState, finish: WorkerState) -> None:
    """As distributed's ``InvalidTransition``: whoever reads it sees how the group came there."""
    group = WorkerGroup(spec(), round=7)
    path = way(start)
    for state in path:
        group.step(state, f"{state.value} because")

    if finish is start or finish in NEXT[start]:
        group.step(finish, "so it is")
        assert group.state is finish
        return
    with pytest.raises(InvalidTransitionError, match="round 7 cannot go from") as caught:
        group.step(finish, "so it is")
    assert (start.value, finish.value) == (caught.value.start, caught.value.finish)
    assert ("INIT: made", *(f"{state.value}: {state.value} because" for state in path)) == caught.value.story
    assert all(step in str(caught.value) for step in caught.value.story)
    assert group.state is start


def test_the_story_is_of_the_last_steps() -> None:
    group = WorkerGroup(spec())
    for number in range(100):
        group.step(WorkerState.HEALTHY, f"started {number}")
        group.step(WorkerState.STOPPED, f"stopped {number}")

    with pytest.raises(InvalidTransitionError) as caught:
        group.step(WorkerState.UNKNOWN, "so it is")

    assert 20 == len(caught.value.story)
    assert "STOPPED: stopped 99" == caught.value.story[-1]


def test_state_written_by_a_hook_does_not_count_as_a_step() -> None:
    """torch's agents may write there whatever they like."""
    group = WorkerGroup(spec())
    group.state = WorkerState.UNKNOWN

    group.step(WorkerState.HEALTHY, "started")

    assert group.state is WorkerState.HEALTHY


def way(to: WorkerState) -> list[WorkerState]:
    """The shortest steps from INIT to that state."""
    ways: dict[WorkerState, list[WorkerState]] = {WorkerState.INIT: []}
    while to not in ways:
        ways |= {after: [*steps, after] for state, steps in ways.items() for after in NEXT[state] - set(ways)}
    return ways[to]


def test_a_new_worker_knows_its_local_rank_only() -> None:
    worker = Worker(3)

    assert (3, -1, -1, -1, -1) == (
        worker.local_rank,
        worker.global_rank,
        worker.role_rank,
        worker.world_size,
        worker.role_world_size,
    )
    assert worker.id is None


def test_a_worker_prints_its_numbers() -> None:
    text = str(Worker(1, 5, 4, 8, 7))

    assert "local_rank=1" in text
    assert "global_rank=5" in text


def test_a_new_group_has_a_worker_for_each_local_rank() -> None:
    group = WorkerGroup(spec(3))

    assert [0, 1, 2] == [worker.local_rank for worker in group.workers]
    assert (WorkerState.INIT, 0, -1) == (group.state, group.restart_count, group.round)


def test_groups_of_the_same_spec_share_no_workers() -> None:
    shared = spec()

    assert WorkerGroup(shared).workers[0] is not WorkerGroup(shared).workers[0]


@pytest.mark.parametrize("state", WorkerState)
def test_failed_and_unhealthy_results_count_as_failed(state: WorkerState) -> None:
    """Row 102: torch lets an unhealthy group pass for a success."""
    expected = state.value in ("FAILED", "UNHEALTHY")

    assert expected == RunResult(state).is_failed()


def test_a_result_crosses_processes() -> None:
    result = RunResult(WorkerState.FAILED, {0: 1.5}, {1: ProcessFailure(1, 9, 3, "", message="m", timestamp=2.0)})

    assert result == pickle.loads(pickle.dumps(result))
