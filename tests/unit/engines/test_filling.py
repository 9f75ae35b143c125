"""`filling` and `with_all_nodes`: only values that nobody gave, the same on all nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve

from elasticlib import LaunchConfig
from elasticlib.engines import EngineContext, Filling, ending, engine_context, filling, with_all_nodes
from elasticlib.engines._slurm_queries import kill_wait_of
from elasticlib.errors import ConfigError, SpecError
from tests.unit.engines import recorded

NOW = 1_790_000_000.0
DEFAULTS: dict[str, Any] = {
    "nnodes": (1, 1),
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": {},
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": None,
}
"""Of the command line."""


def context(environ: Mapping[str, str] = recorded.STEP, **changes: Any) -> EngineContext:
    found = engine_context(environ, now=NOW)
    assert found is not None
    return evolve(found, **changes)


def filled(its: EngineContext | None = None, **given: Any) -> Filling:
    return filling(its or context(), DEFAULTS | given, given)


CONF = {"is_host": False, "reconnect_timeout": 8}
ALL = {
    "nnodes": (4, 4),
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "n1:20061",
    "rdzv_conf": CONF | {"join_timeout": 0},
    "rdzv_id": "1.0.0",
}


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({}, ALL),
        ({"nnodes": (2, 4)}, {name: value for name, value in ALL.items() if name != "nnodes"}),
        ({"rdzv_backend": "c10d"}, {name: value for name, value in ALL.items() if name != "rdzv_backend"}),
        # Nodes of another step may have the same id, and join later.
        (
            {"rdzv_id": "mine"},
            {name: value for name, value in ALL.items() if name != "rdzv_id"} | {"rdzv_conf": CONF},
        ),
        (
            {"rdzv_conf": {"join_timeout": "60"}},
            ALL | {"rdzv_conf": CONF | {"join_timeout": "60"}},
        ),
        (
            {"rdzv_conf": {"timeout": "60"}},
            ALL | {"rdzv_conf": CONF | {"timeout": "60"}},
        ),
        (
            {"rdzv_conf": {"is_host": True, "join_timeout": 5, "reconnect_timeout": 60}},
            {name: value for name, value in ALL.items() if name != "rdzv_conf"},
        ),
        # The user says where the nodes meet: those of another step may come, whose id would be another one.
        (
            {"rdzv_backend": "c10d", "rdzv_endpoint": "head:29400"},
            {"nnodes": (4, 4)},
        ),
        ({"nnodes": (4, 4), "rdzv_backend": "c10d", "rdzv_endpoint": "head:29400", "rdzv_id": "x"}, {}),
        # An etcd server is elsewhere, and has other jobs.
        (
            {"rdzv_backend": "etcd", "rdzv_endpoint": "etcd:2379"},
            {"nnodes": (4, 4), "rdzv_id": "1.0.0", "rdzv_conf": {"join_timeout": 0}},
        ),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "etcd:2379", "rdzv_id": "x"}, {"nnodes": (4, 4)}),
        (
            {"rdzv_backend": "c10d", "rdzv_conf": {"store_type": "file"}, "rdzv_endpoint": "/shared/job"},
            {"nnodes": (4, 4)},
        ),
        # torchrun's fixed places: this node's rank is known.
        (
            {"master_addr": "head", "nnodes": (4, 4)},
            {"node_rank": 2},
        ),
        (
            {"rdzv_backend": "static", "master_port": 29777},
            {"nnodes": (4, 4), "node_rank": 2, "rdzv_endpoint": "n1:29777", "rdzv_id": "1.0.0"},
        ),
        ({"node_rank": 1, "master_addr": "head", "nnodes": (4, 4)}, {}),
        ({"rdzv_backend": "mine"}, {"nnodes": (4, 4), "rdzv_id": "1.0.0"}),
    ],
)
def test_missing_settings_are_filled_in(given: dict[str, Any], values: dict[str, Any]) -> None:
    assert values == filled(**given).values


def test_the_first_node_hosts_the_store() -> None:
    assert {"is_host": True, "reconnect_timeout": 8, "join_timeout": 0} == filled(context(node_rank=0)).values[
        "rdzv_conf"
    ]


def test_an_engine_that_replaces_nodes_leaves_the_join_time() -> None:
    assert "join_timeout" not in filled(context(recorded.SKYPILOT)).values["rdzv_conf"]


def test_the_notice_names_what_was_filled_in() -> None:
    notice = filled(nnodes=(2, 4)).notice

    assert "Slurm step 1.0" in notice and "n1:20061" in notice and "1.0.0" in notice and "--engine none" in notice
    assert "nodes" not in notice


@pytest.mark.parametrize("environ", [recorded.ONE_NODE, {"JOB_COMPLETION_INDEX": "3"}])
def test_one_node_needs_nothing(environ: dict[str, str]) -> None:
    assert Filling() == filled(context(environ))


def test_a_trainjob_gives_the_id_to_the_options_of_its_variables() -> None:
    given = {"nnodes": (4, 4), "node_rank": 3, "master_addr": "llm-node-0-0.llm", "master_port": 29500}

    assert {"rdzv_id": "llm"} == filled(context(recorded.TRAINJOB), **given).values


def test_an_endpoint_is_one_that_this_machine_can_resolve() -> None:
    found = filling(context(), DEFAULTS, (), lambda endpoint: endpoint.replace("n1", "10.0.0.1"))

    assert "10.0.0.1:20061" == found.values["rdzv_endpoint"] and "10.0.0.1:20061" in found.notice


@pytest.mark.parametrize(
    ("nnodes", "rank", "parts"),
    [
        ((1, 2), 0, ("nnodes=2", "4 nodes", "2 nodes will wait as spares")),
        ((1, 1), 0, ("nnodes=1", "4 nodes", "a job of its own")),
        ((1, 2), 1, ()),
        ((2, 4), 0, ()),
        ((4, 6), 0, ()),
    ],
)
def test_fewer_nodes_than_the_step_has_are_a_warning(
    nnodes: tuple[int, int], rank: int, parts: tuple[str, ...]
) -> None:
    warnings = filled(context(node_rank=rank), nnodes=nnodes).warnings

    assert bool(parts) == bool(warnings)
    assert all(part in warnings[0] for part in parts)


def test_one_node_by_option_is_a_job_of_its_own() -> None:
    assert {} == filled(nnodes=(1, 1)).values


def test_several_tasks_on_a_node_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"8 tasks on 4 nodes.*--ntasks-per-node=1"):
        filled(context(recorded.TWO_TASKS))


def test_several_tasks_on_a_node_may_have_all_options() -> None:
    given = {"nnodes": (8, 8), "rdzv_backend": "c10d", "rdzv_endpoint": "n1:29400", "rdzv_id": "x"}

    assert {} == filled(context(recorded.TWO_TASKS), **given).values


# The end of a node.

SIGNALS = "SIGTERM,SIGUSR1,SIGUSR2"
ENDS: dict[str, Any] = {
    "preempt_signal": None,
    "end_time": None,
    "shutdown_timeout": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}


def ended(
    environ: Mapping[str, str] = recorded.STEP, kill_wait: float | None = None, rank: int = 0, **given: Any
) -> Filling:
    its = context(environ, node_rank=rank)
    return ending(its, DEFAULTS | ENDS | given, given, environ, lambda: kill_wait)


@pytest.mark.parametrize(
    ("environ", "kill_wait", "given", "values"),
    [
        (recorded.STEP, None, {}, {"preempt_signal": SIGNALS, "end_time": math.inf, "shutdown_timeout": 25.0}),
        (recorded.ONE_NODE, None, {}, {"preempt_signal": SIGNALS, "end_time": math.inf, "shutdown_timeout": 25.0}),
        (recorded.STEP, 90.0, {}, {"preempt_signal": SIGNALS, "end_time": math.inf, "shutdown_timeout": 85.0}),
        (recorded.STEP, 3.0, {}, {"preempt_signal": SIGNALS, "end_time": math.inf, "shutdown_timeout": 0.0}),
        (recorded.STEP, None, {"preempt_signal": "USR1"}, {"end_time": math.inf, "shutdown_timeout": 25.0}),
        (recorded.STEP, None, {"shutdown_timeout": 10}, {"preempt_signal": SIGNALS, "end_time": math.inf}),
        (
            {**recorded.STEP, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"},
            None,
            {},
            {"preempt_signal": SIGNALS, "end_time": math.inf},
        ),
        (
            {**recorded.STEP, "SLURM_JOB_END_TIME": f"{NOW + 60:.0f}"},
            None,
            {},
            {"preempt_signal": SIGNALS, "shutdown_timeout": 25.0, "end_time": NOW + 60},
        ),
        (
            {**recorded.STEP, "SLURM_JOB_END_TIME": f"{NOW + 60:.0f}"},
            None,
            {"end_time": NOW + 30},
            {"preempt_signal": SIGNALS, "shutdown_timeout": 25.0},
        ),
        (recorded.TRAINJOB, 90.0, {}, {"preempt_signal": "SIGTERM", "shutdown_timeout": 25.0}),
        ({"JOB_COMPLETION_INDEX": "3"}, None, {}, {"preempt_signal": "SIGTERM", "shutdown_timeout": 25.0}),
    ],
)
def test_engine_fills_in_missing_settings_for_the_end_of_a_node(
    environ: dict[str, str], kill_wait: float | None, given: dict[str, Any], values: dict[str, Any]
) -> None:
    found = ended(environ, kill_wait, **given)

    assert values == found.values and () == found.warnings


@pytest.mark.parametrize(
    ("environ", "handled", "announced"),
    [
        (recorded.STEP, "SIGINT", "SIGUSR1,SIGUSR2"),
        (recorded.STEP, "", "SIGUSR1,SIGUSR2"),
        (recorded.STEP, " SIGINT , SIGTERM", SIGNALS),
        ({"JOB_COMPLETION_INDEX": "3"}, "SIGINT", None),
        ({"JOB_COMPLETION_INDEX": "3"}, "SIGINT,SIGTERM", "SIGTERM"),
    ],
)
def test_only_signals_that_the_launcher_handles_announce_the_end(
    environ: dict[str, str], handled: str, announced: str | None
) -> None:
    assert announced == ended(environ, signals_to_handle=handled).values.get("preempt_signal")


@pytest.mark.parametrize(("given", "rank", "warns"), [(25, 0, False), (26, 0, True), (60, 1, False)])
def test_a_stop_longer_than_the_engine_waits_is_a_warning(given: int, rank: int, warns: bool) -> None:
    warnings = ended(rank=rank, shutdown_timeout=given).warnings

    assert warns == bool(warnings)
    assert not warns or ("shutdown_timeout=26" in warnings[0] and "30 s" in warnings[0] and "25" in warnings[0])


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ("ClusterName=x\nKillWait=45\n", 45.0),
        ("killwait = 10 # short\n", 10.0),
        ("#KillWait=45\n", None),
        ("", None),
        ("KillWait=soon", None),
    ],
)
def test_slurms_settings_have_the_time_from_sigterm_to_sigkill(settings: str, seconds: float | None) -> None:
    assert seconds == kill_wait_of(settings)


def test_a_configuration_gets_the_end_of_its_node() -> None:
    config = with_all_nodes(LaunchConfig(min_nodes="all"), recorded.STEP, now=NOW, kill_wait=lambda: 60.0)[0]

    assert (SIGNALS, 55.0) == (config.preempt_signal, config.shutdown_timeout)


def test_a_configuration_gets_no_signal_that_it_does_not_handle() -> None:
    given = LaunchConfig(min_nodes="all", signals_to_handle="SIGINT")

    assert "SIGUSR1,SIGUSR2" == with_all_nodes(given, recorded.STEP, now=NOW)[0].preempt_signal


# `LaunchConfig(min_nodes="all")`.


def placed(environ: Mapping[str, str], **settings: Any) -> LaunchConfig:
    return with_all_nodes(LaunchConfig(min_nodes="all", **settings), environ, now=NOW)[0]


def test_all_nodes_are_those_of_the_step() -> None:
    config = placed(recorded.STEP, nproc_per_node=8)

    assert (4, 4, 8) == (config.min_nodes, config.max_nodes, config.nproc_per_node)
    assert ("c10d", "n1:20061", "1.0.0") == (config.rdzv_backend, config.rdzv_endpoint, config.run_id)
    assert config.rdzv_configs["is_host"] is False
    assert config.rdzv_configs["join_timeout"] == 0


def test_the_settings_of_a_configuration_win() -> None:
    config = placed(recorded.STEP, run_id="mine", rdzv_endpoint="head:29400", rdzv_configs={"join_timeout": 60})

    assert ("head:29400", "mine", 4) == (config.rdzv_endpoint, config.run_id, config.max_nodes)
    assert "is_host" not in config.rdzv_configs and config.rdzv_configs["join_timeout"] == 60


def test_a_trainjob_gives_a_configuration_its_fixed_place() -> None:
    config = placed(recorded.TRAINJOB)

    assert ("static", 3, 4, "llm") == (config.rdzv_backend, config.node_rank, config.max_nodes, config.run_id)
    assert "llm-node-0-0.llm:29500" == config.rdzv_endpoint


@pytest.mark.parametrize("environ", [{}, recorded.ONE_NODE, {**recorded.STEP, "TORCHELASTIC_RUN_ID": "none"}])
def test_all_nodes_without_an_engine_are_this_one(environ: dict[str, str]) -> None:
    config = placed(environ)

    assert (1, 1, "", "") == (config.min_nodes, config.max_nodes, config.rdzv_endpoint, config.run_id)


@pytest.mark.parametrize("environ", [recorded.BATCH, recorded.ALLOCATED, recorded.PTY, recorded.INTERACTIVE])
def test_all_nodes_of_a_job_need_srun(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"min_nodes='all'.*has [24] nodes.*srun"):
        placed(environ)


def test_all_nodes_of_an_engine_that_does_not_count_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_nodes='all': Indexed Job.*number"):
        placed({"JOB_COMPLETION_INDEX": "3"})


def test_all_nodes_and_a_maximum_contradict_each_other() -> None:
    with pytest.raises(SpecError, match=r"max_nodes=4.*min_nodes='all'"):
        LaunchConfig("all", 4)


def test_a_number_of_nodes_asks_no_engine() -> None:
    config = LaunchConfig(2, 3, run_id="x", rdzv_endpoint="h:1")

    assert config is with_all_nodes(config, recorded.STEP, now=NOW)[0]
