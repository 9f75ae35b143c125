"""Which rendezvous a launch means, as a table, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._choice import Choice, PlugIn, Private, choose
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.spec import LaunchConfig

NODE = "here/7-abcdef01"


def chosen(*, token: str | None = None, index: int | None = None, **options: Any) -> tuple[Choice, tuple[str, ...]]:
    config = LaunchConfig(**{"run_id": "job7", **options})
    return choose(config, node=NODE, fresh_id="fresh", token=token, index=index)


def job(*, token: str | None = None, index: int | None = None, **options: Any) -> NodeJob:
    made, _ = chosen(token=token, index=index, **options)
    assert isinstance(made, NodeJob)
    return made


C10D: dict[str, Any] = {"max_nodes": 2, "rdzv_endpoint": "node0:29400"}
STATIC: dict[str, Any] = {
    "min_nodes": 2,
    "max_nodes": 2,
    "rdzv_backend": "static",
    "rdzv_endpoint": "node0:29500",
    "node_rank": 1,
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Private("job7", "c10d")),
        ({"run_id": ""}, Private("fresh", "c10d")),
        ({"run_id": "none"}, Private("none", "c10d")),
        ({"rdzv_endpoint": "localhost:0"}, Private("job7", "c10d")),
        ({"rdzv_endpoint": " [::1]:0 "}, Private("job7", "c10d")),
        ({"rdzv_backend": "static"}, Private("job7", "static")),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0:29511"}, Private("job7", "static", 29511)),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0:0", "node_rank": 0}, Private("job7", "static")),
        ({"rdzv_configs": {"store_type": "file"}}, Private("job7", "c10d")),
        ({"rdzv_configs": {"join_timeout": 3}}, Private("job7", "c10d")),
        ({"rdzv_backend": "mine"}, PlugIn("job7", "mine")),
        ({"rdzv_backend": "mine", "max_nodes": 3}, PlugIn("job7", "mine")),
    ],
)
def test_a_launch_that_needs_no_other_node_asks_none(options: dict[str, Any], expected: Choice) -> None:
    """Rows 021, 023 and 149."""
    assert (expected, ()) == chosen(**options)


@pytest.mark.parametrize(
    ("options", "backend", "endpoint"),
    [
        (C10D, "c10d", "node0:29400"),
        ({"max_nodes": 2, "rdzv_endpoint": " node0 "}, "c10d", "node0"),
        ({"rdzv_endpoint": "node0:29400"}, "c10d", "node0:29400"),
        ({"max_nodes": 2, "rdzv_endpoint": "/f", "rdzv_configs": {"store_type": "file"}}, "c10d", "/f"),
        ({**C10D, "rdzv_backend": "etcd", "rdzv_endpoint": "e1:2379,e2:2379"}, "etcd", "e1:2379,e2:2379"),
        ({"rdzv_backend": "etcd-v3", "rdzv_endpoint": "e1"}, "etcd-v3", "e1"),
        (STATIC, "static", "node0:29500"),
    ],
)
def test_a_launch_among_others_gets_a_place_in_a_job(options: dict[str, Any], backend: str, endpoint: str) -> None:
    made, warnings = chosen(**options)

    assert isinstance(made, NodeJob)
    assert (backend, endpoint, "job7", NODE) == (made.backend, made.endpoint, made.run_id, made.node)
    assert () == warnings


def test_job_gets_all_requested_options() -> None:
    made = job(
        **{**C10D, "max_nodes": 4, "min_nodes": 2},
        max_restarts=9,
        local_addr="10.0.0.7",
        token="secret",
        wait_for="min",
        rdzv_configs={"join_timeout": 1, "last_call_timeout": 2, "heartbeat_timeout": 3, "close_timeout": 4}
        | {"reconnect_timeout": 5, "is_host": "1", "read_timeout": 6},
    )

    assert (2, 4, 9) == (made.min_nodes, made.max_nodes, made.max_restarts)
    assert ("10.0.0.7", "secret", "min") == (made.local_addr, made.token, made.wait_for)
    assert (1, 2, 3, 4, 5) == (
        made.join_timeout,
        made.last_call,
        made.heartbeat,
        made.close_timeout,
        made.reconnect_timeout,
    )
    assert (True, {"read_timeout": 6}) == (made.is_host, made.options)


def test_static_takes_its_timeout_for_joining() -> None:
    """Row 030."""
    assert 900 == job(**STATIC).join_timeout
    assert 20 == job(**STATIC, rdzv_timeout=20).join_timeout


@pytest.mark.parametrize(("rank", "hosts"), [(0, True), (1, False)])
def test_the_node_with_rank_0_hosts_a_static_job(rank: int, hosts: bool) -> None:
    """Row 025."""
    made = job(**{**STATIC, "node_rank": rank}, index=5)

    assert (rank, hosts) == (made.node_rank, made.is_host)


def test_a_static_rank_may_stand_in_the_configs_as_in_torch() -> None:
    made = job(**{**STATIC, "node_rank": None, "rdzv_configs": {"rank": "1"}})

    assert 1 == made.node_rank


def test_a_schedulers_number_orders_the_nodes_of_an_elastic_job() -> None:
    assert 5 == job(**C10D, index=5).node_rank


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({**STATIC, "rdzv_endpoint": ""}, "rdzv_endpoint='': .*node0:29500"),
        ({"min_nodes": 2, "max_nodes": 2, "rdzv_configs": {"store_type": "file"}}, "rdzv_endpoint='': .*/shared/job"),
        ({"max_nodes": 2, "rdzv_endpoint": ":29400"}, "rdzv_endpoint=':29400'.* host is missing"),
        ({**C10D, "rdzv_endpoint": "node0:70000"}, "rdzv_endpoint='node0:70000'.*70000"),
        ({**C10D, "rdzv_endpoint": "node0:http"}, "rdzv_endpoint='node0:http'"),
        ({**C10D, "rdzv_endpoint": "a b:1"}, "rdzv_endpoint='a b:1'"),
        ({"rdzv_endpoint": "node0:x"}, "rdzv_endpoint='node0:x'"),
        ({**STATIC, "rdzv_endpoint": "node0"}, "rdzv_endpoint='node0' has no port"),
        ({**STATIC, "rdzv_endpoint": "node0:0"}, "free port"),
        ({"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": "localhost:0"}, "free port.*min_nodes=2"),
        ({**STATIC, "node_rank": None}, "node_rank=None: .* from 0 to 1"),
        ({**STATIC, "node_rank": 2}, "node_rank=2 is out of range for 2 nodes: give a number from 0 to 1"),
        ({"rdzv_backend": "static", "node_rank": 1}, "node_rank=1 is out of range for 1 node:"),
        ({**C10D, "wait_for": "min", "rdzv_configs": {"wait_for": "max"}}, "wait_for='min' and .*'max' differ"),
        ({**C10D, "min_nodes": 2, "run_id": ""}, "run_id=''"),
        ({**STATIC, "min_nodes": 1, "run_id": ""}, "run_id=''"),
        ({"local_addr": "10.0.0.7:22/x"}, "local_addr='10.0.0.7:22/x' must be a host's name"),
        ({"local_addr": "node1:29400"}, "local_addr='node1:29400' must be a host's name or address, without a port"),
    ],
)
def test_invalid_options_are_refused_before_anything_waits(options: dict[str, Any], named: str) -> None:
    """Rows 024 to 026 and 033, and contradictions."""
    with pytest.raises(ValueError, match=named):
        chosen(**options)


def test_a_token_that_would_keep_nobody_out_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="does not support a token") as caught:
        chosen(rdzv_backend="mine", token="s3cret")

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"node_rank": 0}, "node_rank=0 is ignored"),
        ({**C10D, "node_rank": 1}, "node_rank=1 is ignored"),
        ({"rdzv_backend": "mine", "node_rank": 1}, "node_rank=1 is ignored"),
        ({"rdzv_backend": "mine", "wait_for": "min"}, "wait_for='min' has no effect"),
        ({"max_nodes": 4, "rdzv_endpoint": "localhost:0"}, "stays at one node of max_nodes=4"),
        ({**C10D, "run_id": "none"}, "give each job its own id"),
        ({"rdzv_endpoint": "node0:29400", "run_id": ""}, "this job gets the id fresh"),
        ({**C10D, "run_id": ""}, "this job gets the id fresh, so no other node can join it"),
        ({**C10D, "rdzv_configs": {"last_call": 3}}, "did you mean last_call_timeout"),
        ({"rdzv_configs": {"last_call": 3}}, "did you mean last_call_timeout"),
        ({"rdzv_configs": {"cas_backoff_max_seconds": 2}}, "{'cas_backoff_max_seconds': 2} has no effect"),
        ({"max_nodes": 2}, "rdzv_endpoint='' means localhost:29400: only nodes on this machine"),
        ({"rdzv_backend": "etcd"}, "rdzv_endpoint='' means localhost:2379: only nodes on this machine"),
        ({"max_nodes": 2, "rdzv_configs": {"store_type": "file"}}, "stays at one node of max_nodes=2"),
        ({**STATIC, "min_nodes": 1}, "min_nodes=1 is ignored: with rdzv_backend='static'"),
        ({**STATIC, "rdzv_configs": {"rank": 0}}, "rdzv_configs={'rank': 0} is ignored: node_rank=1"),
    ],
)
def test_warning_names_an_option_with_an_unexpected_effect(options: dict[str, Any], named: str) -> None:
    """Rows 027 and 165."""
    (warning,) = chosen(**options)[1]

    assert named in warning


def test_nodes_without_an_endpoint_meet_where_torchs_do() -> None:
    assert "localhost:29400" == job(max_nodes=2).endpoint
    assert "localhost:2379" == job(rdzv_backend="etcd-v2").endpoint


def test_static_job_waits_for_all_nodes_whatever_min_nodes_is() -> None:
    assert 2 == job(**{**STATIC, "min_nodes": 1}).min_nodes


@pytest.mark.parametrize(("rank", "index", "scheduled"), [(1, 1, True), (1, 0, False), (1, None, False)])
def test_a_node_rank_that_the_scheduler_gave_is_known_as_such(rank: int, index: int | None, scheduled: bool) -> None:
    assert scheduled == job(**STATIC | {"node_rank": rank}, index=index).is_scheduled


def test_an_empty_local_address_is_none() -> None:
    assert job(**C10D, local_addr="").local_addr is None


def test_jobs_on_fixed_ports_may_share_the_default_id() -> None:
    assert () == chosen(**STATIC, run_id="none")[1]


def test_a_private_launch_stays_at_one_node_on_a_free_port() -> None:
    assert Private("job7", "c10d") == chosen(max_nodes=4, rdzv_endpoint="localhost:0")[0]


@pytest.mark.parametrize("address", ["node-1.x_y", "10.0.0.7", "fe80::1%eth0"])
def test_names_and_numeric_addresses_are_local_addresses(address: str) -> None:
    assert address == job(**C10D, local_addr=address).local_addr


def test_a_job_does_not_show_its_token() -> None:
    assert "s3cret" not in repr(job(**C10D, token="s3cret"))
