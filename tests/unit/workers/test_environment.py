"""The environment of a worker: what it is told, and what of the user's is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import ConfigError
from elasticlib.workers._environment import (
    NodePlace,
    alone_with_a_device,
    common_variables,
    threads_per_worker,
    worker_variables,
)

PLACE = NodePlace(
    run_id="job-7",
    role="trainer",
    local_world_size=4,
    group_rank=1,
    group_world_size=3,
    rank_base=2,
    world_size=9,
    role_rank_base=1,
    role_world_size=6,
    restart_count=2,
    max_restarts=3,
    master_addr="10.0.0.1",
    master_port=29500,
)


def test_a_worker_is_told_all_that_torchs_workers_are_told() -> None:
    assert worker_variables(PLACE, 3, "/logs/attempt_2/3/error.json") == {
        "LOCAL_RANK": "3",
        "RANK": "5",
        "GROUP_RANK": "1",
        "ROLE_RANK": "4",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "9",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job-7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/attempt_2/3/error.json",
    }


def test_ranks_within_a_node_are_the_base_and_the_local_rank() -> None:
    found = [worker_variables(PLACE, rank, "") for rank in range(PLACE.local_world_size)]

    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["RANK"] for each in found] == ["2", "3", "4", "5"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_ranks_over_nodes_of_any_size_are_all_different_and_complete(sizes: list[int]) -> None:
    world = sum(sizes)
    bases = [sum(sizes[:node]) for node in range(len(sizes))]

    ranks = [
        int(worker_variables(replace(PLACE, rank_base=base, local_world_size=size, world_size=world), rank, "")["RANK"])
        for base, size in zip(bases, sizes, strict=True)
        for rank in range(size)
    ]

    assert ranks == list(range(world))


def test_two_roles_count_their_ranks_for_themselves() -> None:
    reader = replace(PLACE, role="reader", rank_base=6, role_rank_base=0, role_world_size=3, local_world_size=3)

    values = worker_variables(reader, 2, "")

    assert (values["ROLE_NAME"], values["ROLE_RANK"], values["ROLE_WORLD_SIZE"]) == ("reader", "2", "3")
    assert values["RANK"] == "8"


def test_workers_of_a_round_share_the_stores_address() -> None:
    found = [worker_variables(PLACE, rank, "") for rank in range(4)]

    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found} == {("10.0.0.1", "29500")}


@pytest.mark.parametrize(("agent_store", "text"), [(True, "True"), (False, "False")])
def test_who_hosts_the_store_is_said_in_the_words_that_torch_compares(agent_store: bool, text: str) -> None:
    values = worker_variables(replace(PLACE, agent_store=agent_store), 0, "")

    assert values["TORCHELASTIC_USE_AGENT_STORE"] == text


def test_a_worker_without_an_error_file_is_told_of_none() -> None:
    assert worker_variables(PLACE, 0, "")["TORCHELASTIC_ERROR_FILE"] == ""


def test_all_workers_share_the_launchers_environment_with_torchs_defaults() -> None:
    assert common_variables({"HOME": "/root"}, 3, "SIGTERM") == {
        "HOME": "/root",
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
    }


def test_what_the_user_has_set_is_kept() -> None:
    own = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

    assert common_variables(own, 7, "").items() >= own.items()


def test_the_signals_of_this_launch_beat_those_of_a_launch_around_it() -> None:
    around = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"}

    assert "SIGTERM,SIGUSR1" == common_variables(around, 1, "SIGTERM,SIGUSR1")["TORCHELASTIC_SIGNALS_TO_HANDLE"]


def test_the_jobs_token_is_for_its_nodes_alone() -> None:
    around = {"HOME": "/root", "ELASTICLIB_TOKEN": "s3cret"}

    assert "s3cret" not in common_variables(around, 1, "SIGTERM").values()


def test_the_launchers_environment_is_not_changed() -> None:
    own = {"HOME": "/root"}

    common_variables(own, 1, "SIGTERM")

    assert own == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("cpus", "workers", "threads"),
    [(8.0, 1, 8), (8.0, 2, 4), (8.0, 3, 2), (2.0, 8, 1), (2.5, 1, 2), (0.5, 1, 1)],
)
def test_cpus_are_divided_among_the_workers_and_each_has_one_at_least(cpus: float, workers: int, threads: int) -> None:
    assert threads_per_worker({}, cpus, workers) == threads


@pytest.mark.parametrize(("value", "threads"), [("6", 6), (" 6 ", 6), ("6,2", 6)])
def test_a_thread_count_of_the_users_is_taken(value: str, threads: int) -> None:
    assert threads_per_worker({"OMP_NUM_THREADS": value}, 8.0, 4) == threads


@pytest.mark.parametrize("value", ["", "0", "-1", "many"])
def test_a_thread_count_that_is_none_is_computed_as_if_unset(value: str) -> None:
    assert threads_per_worker({"OMP_NUM_THREADS": value}, 8.0, 4) == 2


# Virtual local ranks.


def test_with_a_virtual_local_rank_each_worker_is_alone_with_its_entry_of_the_list() -> None:
    """Row 060."""
    found = alone_with_a_device({"CUDA_VISIBLE_DEVICES": "3, GPU-8a2f ,1"}, 2)

    assert (
        {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"},
        {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-8a2f"},
    ) == found


def test_without_a_list_the_device_has_the_number_of_the_real_local_rank() -> None:
    assert ["0", "1", "2"] == [each["CUDA_VISIBLE_DEVICES"] for each in alone_with_a_device({}, 3)]


@pytest.mark.parametrize("listed", ["", " "])
def test_a_list_that_hides_all_devices_hides_them_from_a_single_worker(listed: str) -> None:
    assert ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""},) == alone_with_a_device(
        {"CUDA_VISIBLE_DEVICES": listed}, 1
    )


@pytest.mark.parametrize(
    ("listed", "entries"), [("0,1,", ["0", "1"]), ("0,,1", ["0", ""]), (" ,0", [""]), ("0,1,", ["0", "1", ""])]
)
def test_an_empty_entry_shows_its_worker_no_device_as_under_torch(listed: str, entries: list[str]) -> None:
    found = alone_with_a_device({"CUDA_VISIBLE_DEVICES": listed}, len(entries))

    assert entries == [each["CUDA_VISIBLE_DEVICES"] for each in found]


def test_rocms_own_list_beats_the_other_and_both_are_set() -> None:
    found = alone_with_a_device({"HIP_VISIBLE_DEVICES": "5, 6", "CUDA_VISIBLE_DEVICES": "0"}, 2)

    assert (
        {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "5"},
        {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "6", "HIP_VISIBLE_DEVICES": "6"},
    ) == found


def test_an_empty_list_of_rocm_is_none() -> None:
    (found,) = alone_with_a_device({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3"}, 1)

    assert {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"} == found


def test_a_list_of_rocm_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="HIP_VISIBLE_DEVICES='5' names 1 devices for 2 workers"):
        alone_with_a_device({"HIP_VISIBLE_DEVICES": "5"}, 2)


@pytest.mark.parametrize(
    ("listed", "workers", "named"),
    [("0", 2, 1), ("0,1,2", 4, 3), ("", 2, 0), (",", 2, 0), ("0,,1", 4, 2)],
)
def test_a_list_without_a_device_for_each_worker_is_refused(listed: str, workers: int, named: int) -> None:
    """Row 061."""
    with pytest.raises(
        ValueError, match=rf"CUDA_VISIBLE_DEVICES='{listed}' names {named} devices for {workers} workers: list one for"
    ) as caught:
        alone_with_a_device({"CUDA_VISIBLE_DEVICES": listed}, workers)
    assert isinstance(caught.value, ConfigError)
