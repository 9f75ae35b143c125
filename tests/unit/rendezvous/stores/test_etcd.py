"""Checks of values by the etcd backend before it connects."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._exchange import parts
from elasticlib.rendezvous.stores._keys import component
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._v3 import _BYTES, _OPERATIONS


def backend(endpoint: str = "h:1", run_id: str = "run", heartbeat: float = 10.0, **options: Any) -> EtcdBackend:
    job = NodeJob(run_id=run_id, node="n", backend="etcd", endpoint=endpoint, heartbeat=heartbeat, options=options)
    return EtcdBackend(job)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("h", [("h", 2379)]),
        ("h:1", [("h", 1)]),
        ("[::1]", [("::1", 2379)]),
        ("a:1,b, c:3", [("a", 1), ("b", 2379), ("c", 3)]),
        ("a,a:2379", [("a", 2379)]),
    ],
)
def test_an_endpoint_names_one_or_several_servers(endpoint: str, expected: list[tuple[str, int]]) -> None:
    assert expected == backend(endpoint)._endpoints


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("h:0", "port 0"), ("h:x", "port 'x'"), ("http://h:1", "URL")],
)
def test_a_bad_endpoint_is_refused_before_anything_waits(endpoint: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        backend(endpoint)


def test_another_back_end_s_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="rdzv_backend='c10d' is unknown: give one of etcd, etcd-v2, etcd-v3"):
        EtcdBackend(NodeJob(run_id="run", node="n", backend="c10d", endpoint="h:1"))


@pytest.mark.parametrize("name", ["ssl_cert", "ssl_cert_key", "ca_cert"])
def test_a_missing_tls_file_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='/no/such/file' does not exist"):
        backend(protocol="https", **{name: "/no/such/file"})


@pytest.mark.parametrize("name", ["cert", "key", "cacert"])
def test_the_other_names_of_tls_files_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        backend(protocol="https", **{name: "/no/such/file"})


def test_tls_files_without_tls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("")

    with pytest.raises(ConfigError, match="ca_cert is given, but protocol is http: add protocol=https"):
        backend(ca_cert=str(tmp_path / "ca"))


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")

    with pytest.raises(ConfigError, match="is given without ssl_cert"):
        backend(protocol="https", ssl_cert_key=str(tmp_path / "key"))


@pytest.mark.parametrize(("name", "why"), [("ca_cert", "contains no certificate"), ("ssl_cert", "not a certificate")])
def test_a_tls_file_that_holds_something_else_is_named(tmp_path: Path, name: str, why: str) -> None:
    path = tmp_path / "file"
    path.write_text("nothing")

    with pytest.raises(ConfigError, match=rf"{name}='{path}'.*{why}"):
        backend(protocol="https", **{name: str(path)})


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="protocol='ftp' must be http or https"):
        backend(protocol="ftp")


@pytest.mark.parametrize("prefix", ["/a/b", "a/b/", "/a/b/"])
def test_keys_lie_under_the_prefix(prefix: str) -> None:
    assert "/a/b/job_run" == backend(etcd_prefix=prefix)._root


def test_keys_lie_where_torch_s_do_by_default() -> None:
    assert "/torchelastic/p2p/job_run" == backend()._root


@pytest.mark.parametrize(
    ("heartbeat", "options", "limit"),
    [(10.0, {}, 5.0), (1.0, {}, 2.0), (0.0, {}, 60.0), (10.0, {"read_timeout": 3}, 3.0), (0.0, {"read_timeout": 7}, 7)],
)
def test_a_silent_server_is_noticed_before_this_node_is_thought_lost(
    heartbeat: float, options: dict[str, Any], limit: float
) -> None:
    assert math.isclose(limit, backend(heartbeat=heartbeat, **options)._limit)


def test_the_address_is_unknown_before_a_server_answered() -> None:
    assert backend().address() is None


@given(st.text(), st.text())
def test_different_names_are_different_parts_of_a_path(one: str, other: str) -> None:
    assert (one == other) == (component(one) == component(other))


@given(st.text())
def test_a_part_of_a_path_is_plain(name: str) -> None:
    part = component(name)

    assert part
    assert "/" not in part
    assert part.isascii()
    assert part[0] not in "._"


def test_a_transaction_stays_within_etcd_s_limits() -> None:
    small = {f"key{number}": b"x" for number in range(250)}
    large = {f"key{number}": b"x" * 200_000 for number in range(5)}

    assert [120, 120, 10] == [len(part) for part in parts(small, _OPERATIONS, _BYTES)]
    assert [2, 2, 1] == [len(part) for part in parts(large, _OPERATIONS, _BYTES)]
    assert [*small.items()] == [pair for part in parts(small, _OPERATIONS, _BYTES) for pair in part]
    assert [] == list(parts({}, _OPERATIONS, _BYTES))
