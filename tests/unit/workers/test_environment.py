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


def test_worker_gets_all_variables_that_torchs_workers_get() -> None:
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


@pytest.mark.parametrize(("agent_store", "text"), [(True, "True"), (False, "False")])
def test_host_of_the_store_is_stated_in_the_text_that_torch_compares(agent_store: bool, text: str) -> None:
    values = worker_variables(replace(PLACE, agent_store=agent_store), 0, "")

    assert values["TORCHELASTIC_USE_AGENT_STORE"] == text


KEPT = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
DEFAULTS = {
    "OMP_NUM_THREADS": "3",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
}


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ({"HOME": "/root"}, {"HOME": "/root"}),
        (KEPT, KEPT),
        ({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"}, {}),
        ({"ELASTICLIB_TOKEN": "s3cret"}, {}),
    ],
    ids=["any variable", "set by the user", "signals of a launch around it", "the token"],
)
def test_workers_share_the_launchers_environment_with_torchs_defaults(
    own: dict[str, str], seen: dict[str, str]
) -> None:
    """The user's values are kept, but for the signals of a launch around this one; the token is for nodes alone."""
    before = dict(own)

    assert DEFAULTS | seen == common_variables(own, 3, "SIGTERM")
    assert before == own


@pytest.mark.parametrize(
    ("own", "cpus", "workers", "threads"),
    [
        *(({}, *each) for each in ((8.0, 1, 8), (8.0, 3, 2), (2.0, 8, 1), (2.5, 1, 2), (0.5, 1, 1))),
        *(({"OMP_NUM_THREADS": value}, 8.0, 4, 6) for value in ("6", " 6 ", "6,2")),
        *(({"OMP_NUM_THREADS": value}, 8.0, 4, 2) for value in ("", "0", "-1", "many")),
    ],
)
def test_cpus_are_divided_among_the_workers_unless_the_user_chose_a_number(
    own: dict[str, str], cpus: float, workers: int, threads: int
) -> None:
    """Each worker has one thread at least; a number that is none counts as none."""
    assert threads == threads_per_worker(own, cpus, workers)


# Virtual local ranks.


CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({CUDA: "3, GPU-8a2f ,1"}, [{CUDA: "3"}, {CUDA: "GPU-8a2f"}]),
        ({}, [{CUDA: "0"}, {CUDA: "1"}, {CUDA: "2"}]),
        ({CUDA: ""}, [{CUDA: ""}]),
        ({CUDA: " "}, [{CUDA: ""}]),
        ({CUDA: "0,,1"}, [{CUDA: "0"}, {CUDA: ""}]),
        ({CUDA: " ,0"}, [{CUDA: ""}]),
        ({CUDA: "0,1,"}, [{CUDA: "0"}, {CUDA: "1"}, {CUDA: ""}]),
        ({HIP: "5, 6", CUDA: "0"}, [{CUDA: "5", HIP: "5"}, {CUDA: "6", HIP: "6"}]),
        ({HIP: "", CUDA: "3"}, [{CUDA: "3"}]),
    ],
)
def test_virtual_local_rank_gives_each_worker_its_own_entry(
    environment: dict[str, str], devices: list[dict[str, str]]
) -> None:
    """Row 060. An empty entry shows no device, as under torch; ROCm's own list beats the other, if it is not empty."""
    expected = tuple({"LOCAL_RANK": "0", **each} for each in devices)

    assert expected == alone_with_a_device(environment, len(devices))


@pytest.mark.parametrize(
    ("name", "listed", "workers", "named"),
    [(CUDA, "0", 2, 1), (CUDA, "", 2, 0), (CUDA, ",", 2, 0), (CUDA, "0,,1", 4, 2), (HIP, "5", 2, 1)],
)
def test_a_list_without_a_device_for_each_worker_is_refused(name: str, listed: str, workers: int, named: int) -> None:
    """Row 061."""
    with pytest.raises(ConfigError, match=f"{name}='{listed}' names {named} devices for {workers} workers: list one"):
        alone_with_a_device({name: listed}, workers)
