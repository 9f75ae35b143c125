"""`engine_context`: a table of environments, and input that is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticlib.engines import EngineContext, engine_context, is_shared_step, scheduler_index
from elasticlib.errors import ConfigError
from tests.unit.engines import recorded

NOW = 1_790_000_000.0


def read(environ: dict[str, str], engine: str = "auto") -> EngineContext | None:
    return engine_context(environ, engine, now=NOW)


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        (
            recorded.STEP,
            {
                "engine": "slurm",
                "num_nodes": 4,
                "node_rank": 2,
                "rdzv_endpoint": "n1:20061",
                "run_id": "1.0.0",
                "restart_count": 0,
                "hosts": ("n1", "n2", "n3", "n4"),
                "num_agents": 4,
                "title": "Slurm step 1.0",
            },
        ),
        (recorded.ONE_NODE, {"num_nodes": 1, "node_rank": 0, "run_id": "1.1.0"}),
        (recorded.TWO_TASKS, {"num_nodes": 4, "num_agents": 8}),
        (
            recorded.HETEROGENEOUS,
            {"num_nodes": 3, "node_rank": 1, "rdzv_endpoint": "n1:20305", "hosts": ("n1", "n2", "n3")},
        ),
        (recorded.ARRAY, {"run_id": "10.0.0", "rdzv_endpoint": "n1:20610"}),
        (recorded.REQUEUED, {"run_id": "12.0.1", "restart_count": 1}),
        ({**recorded.STEP, "SLURM_JOB_END_TIME": "1790000060"}, {"deadline": NOW + 60}),
        (
            recorded.TRAINJOB,
            {
                "engine": "trainjob",
                "num_nodes": 4,
                "node_rank": 3,
                "rdzv_backend": "static",
                "rdzv_endpoint": "llm-node-0-0.llm:29500",
                "run_id": "llm",
            },
        ),
        ({**recorded.TRAINJOB, "PET_RDZV_ID": "mine", "PET_NNODES": "2:4"}, {"run_id": "mine", "num_nodes": 4}),
        ({"JOB_COMPLETION_INDEX": "3"}, {"engine": "kubernetes", "node_rank": 3, "num_nodes": None, "run_id": ""}),
        (
            recorded.SKYPILOT,
            {
                "engine": "skypilot",
                "num_nodes": 2,
                "node_rank": 1,
                "rdzv_endpoint": "10.0.0.4:29400",
                "run_id": "sky-2026-11-28-10-00-00-000000_train_7",
            },
        ),
        (recorded.DSTACK, {"engine": "dstack", "num_nodes": 2, "node_rank": 0, "run_id": "f3b1"}),
    ],
)
def test_context_holds_the_facts_that_the_engine_reports(environ: dict[str, str], facts: dict[str, Any]) -> None:
    context = read(environ)

    assert facts == {name: getattr(context, name) for name in facts}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        recorded.BATCH,
        recorded.ALLOCATED,
        recorded.INTERACTIVE,
        recorded.PTY,
        {**recorded.STEP, "TORCHELASTIC_RUN_ID": "none"},
        {**recorded.TRAINJOB, "TORCHELASTIC_RUN_ID": "none"},
        {"PET_NODE_RANK": "1"},
        {"SKYPILOT_NODE_RANK": "1"},
        {"DSTACK_NODE_RANK": "1"},
    ],
)
def test_no_engine_has_placed_other_processes(environ: dict[str, str]) -> None:
    assert read(environ) is None


def test_a_time_limit_that_is_over_may_have_been_extended() -> None:
    context = read({**recorded.STEP, "SLURM_JOB_END_TIME": "1789999990"})

    assert context is not None and math.inf == context.deadline


def test_neighbouring_jobs_have_ports_of_their_own() -> None:
    ports = {
        (job, step): context.rdzv_endpoint
        for job in range(300, 320)
        for step in range(10)
        if (context := read({**recorded.STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})) is not None
    }

    assert 200 == len(set(ports.values()))


def test_a_named_engine_counts_where_auto_finds_none() -> None:
    context = read(recorded.PTY, "slurm")

    assert context is not None and context.num_nodes == 2


def test_none_ignores_all_engines() -> None:
    assert read(recorded.STEP, "none") is None


@pytest.mark.parametrize(
    ("environ", "engine", "parts"),
    [
        (recorded.STEP, "pbs", ("engine='pbs'", "slurm", "none")),
        ({}, "slurm", ("engine='slurm'", "SLURM_STEP_ID")),
        (recorded.STEP, "skypilot", ("SKYPILOT_NODE_RANK",)),
        ({**recorded.STEP, "SLURM_STEP_NUM_NODES": "3"}, "auto", ("SLURM_STEP_NUM_NODES=3", "4 hosts")),
        ({**recorded.STEP, "SLURM_NODEID": "4"}, "auto", ("SLURM_NODEID=4", "SLURM_STEP_NUM_NODES=4")),
        ({**recorded.STEP, "SLURM_STEP_ID": "x"}, "auto", ("SLURM_STEP_ID='x'",)),
        ({**recorded.STEP, "SLURM_STEP_ID": "9" * 50}, "auto", ("SLURM_STEP_ID", "whole number")),
        ({**recorded.STEP, "SLURM_STEP_NODELIST": "n[1-"}, "auto", ("SLURM_STEP_NODELIST", "n[1-")),
        ({**recorded.STEP, "SLURM_STEP_NODELIST": ""}, "auto", ("SLURM_STEP_NODELIST",)),
        ({**recorded.SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "auto", ("SKYPILOT_NUM_NODES=3", "2 hosts")),
        ({**recorded.SKYPILOT, "SKYPILOT_NODE_IPS": " "}, "auto", ("SKYPILOT_NODE_IPS",)),
        ({**recorded.DSTACK, "DSTACK_NODE_RANK": "2"}, "auto", ("DSTACK_NODE_RANK=2", "DSTACK_NODES_NUM=2")),
        ({**recorded.DSTACK, "DSTACK_NODES_NUM": "0", "DSTACK_NODES_IPS": ""}, "auto", ("DSTACK_NODES_NUM=0",)),
        ({**recorded.TRAINJOB, "PET_NODE_RANK": "first"}, "auto", ("PET_NODE_RANK='first'",)),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    environ: dict[str, str], engine: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(environ, engine)

    for part in (*parts, "none"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "is_shared"),
    [
        ({**recorded.STEP, "SLURM_PROCID": "0"}, True),
        (recorded.STEP, False),
        (recorded.PTY, True),
        ({**recorded.TWO_TASKS, "SLURM_PROCID": "0"}, False),
        (recorded.ONE_NODE, False),
        ({}, False),
    ],
)
def test_a_step_is_shared_by_the_tasks_of_several_nodes(environ: dict[str, str], is_shared: bool) -> None:
    assert is_shared == is_shared_step(environ)


@pytest.mark.parametrize(
    ("environ", "index"),
    [
        ({}, None),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "3"}, None),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "8"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "JOB_COMPLETION_INDEX": "2"}, 2),
        ({"JOB_COMPLETION_INDEX": "0"}, 0),
        ({"JOB_COMPLETION_INDEX": "-1"}, None),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_GLOBAL_INDEX": "3"}, 3),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_GLOBAL_INDEX": "3", "JOB_COMPLETIONS": "2"}, 7),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_GLOBAL_INDEX": "x"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
        ({"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2"}, 1),
    ],
)
def test_a_schedulers_number_counts_where_it_numbers_several(environ: dict[str, str], index: int | None) -> None:
    assert index == scheduler_index(environ)
