"""The classes and functions by which torch's users make a shared state and a rendezvous themselves."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elasticlib import DefaultLogsSpecs, LocalElasticAgent, WorkerSpec
from elasticlib.errors import ConfigError, RendezvousClosedError, RendezvousConnectionError
from elasticlib.rendezvous import RendezvousParameters, get_rendezvous_handler
from elasticlib.rendezvous.handlers import _c10d_backend as c10d, _etcd as on_etcd
from elasticlib.rendezvous.handlers._etcd import EtcdRendezvous, EtcdRendezvousHandler
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_free_port, stop_etcd
from tests.etcd import running_etcd

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

LONG = 30.0


def params(endpoint: str, backend: str = "c10d", **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", 1, 2, **options)


def free_port() -> int:
    with find_free_port() as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


def test_the_first_node_opens_the_store_and_others_share_its_state() -> None:
    endpoint = f"localhost:{free_port()}"
    with ThreadPoolExecutor(1) as pool:  # who may not host waits for who does
        waiting = pool.submit(c10d.create_backend, params(endpoint, is_host=False, read_timeout=LONG))
        host, store = c10d.create_backend(params(endpoint, is_host=True))
        other, _ = waiting.result(LONG)

    first = host.set_state(b"1")
    assert first is not None
    assert first[:2] == other.get_state()
    store.set("key", "value")
    assert b"value" == store.get("key")
    assert timedelta(seconds=60) == store.timeout  # type: ignore[attr-defined]


def test_host_has_the_address_and_a_second_node_here_joins() -> None:
    endpoint = f"127.0.0.1:{free_port()}"

    (one, _), (other, _) = (c10d.create_backend(params(endpoint)) for _ in range(2))

    assert one.set_state(b"1") is not None
    assert other.get_state() == one.get_state()


def test_missing_store_is_given_up_in_time() -> None:
    began = time.monotonic()

    with pytest.raises(RendezvousConnectionError, match=r"given up after read_timeout=0\.3 s"):
        c10d.create_backend(params(f"localhost:{free_port()}", is_host=False, read_timeout=0.3))
    assert 0.3 <= time.monotonic() - began < LONG


def test_a_file_carries_a_state_too(tmp_path: Path) -> None:
    place = str(tmp_path / "store")

    (one, _), (other, _) = (c10d.create_backend(params(place, store_type="file")) for _ in range(2))
    first = one.set_state(b"1")

    assert first is not None
    assert (b"1", first[1], False) == other.set_state(b"2")
    assert first[:2] == other.get_state()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"store_type": "other"}, "store_type must be tcp or file"),
        ({"read_timeout": 0}, "read_timeout must be a number of seconds above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        c10d.create_backend(params("localhost:0", **options))


@pytest.mark.parametrize("options", [{"read_timeout": 0}, {"read_timeout": -1}, {"is_host": "maybe"}, {}])
def test_options_of_tcp_stores_alone_are_ignored_for_a_file(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, store = c10d.create_backend(params(str(tmp_path / "store"), store_type="file", **options))

    assert store.timeout == timedelta(seconds=300)  # torch's own
    assert [name for name in options if f"{name} must be" in caplog.text] == list(options)


def test_an_option_that_nobody_reads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    c10d.create_backend(params("localhost:0", read_timout=1))

    assert "did you mean read_timeout" in caplog.text


def master() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"))


@pytest.mark.parametrize("api", ["etcd", "etcd-v2"])
def test_workers_on_etcd_find_the_master_of_the_specification(etcd: EtcdServer, api: str) -> None:
    handler = get_rendezvous_handler(RendezvousParameters(api, etcd.get_endpoint(), "job", 1, 1))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=master, master_addr="test_host", master_port=42, preload=())

    assert LocalElasticAgent(spec, DefaultLogsSpecs()).run().return_values == {0: ("test_host", "42", "False")}


@pytest.mark.parametrize("api", ["etcd", "etcd-v2", "etcd-v3"])
def test_state_on_etcd_is_removed_when_its_time_is_over(etcd: EtcdServer, api: str) -> None:
    backend, store = on_etcd.create_backend(params(etcd.get_endpoint(), api))
    short = on_etcd.EtcdRendezvousBackend(store.client, "job", "/short", ttl=1)  # type: ignore[attr-defined]

    for each in (backend, short):
        assert each.set_state(b"1") is not None

    deadline = time.monotonic() + LONG
    while short.get_state() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert backend.get_state() is not None


@pytest.mark.parametrize("ttl", [0, -1])
def test_a_time_that_is_over_at_once_is_refused(etcd: EtcdServer, ttl: int) -> None:
    with contextlib.closing(etcd.get_client()) as client, pytest.raises(ConfigError, match=f"ttl={ttl} must be"):
        on_etcd.EtcdRendezvousBackend(client, "job", ttl=ttl)


def test_nodes_on_etcd_meet_at_a_barrier_and_share_keys(etcd: EtcdServer) -> None:
    with contextlib.closing(etcd.get_client()) as client:
        nodes = [EtcdRendezvous(place, "/jobs", "job", 2, 2, 60, 1) for place in (client, etcd.get_endpoint())]
        with ThreadPoolExecutor(2) as pool:
            places = list(pool.map(EtcdRendezvous.rendezvous_barrier, nodes))
        one, other = (node.setup_kv_store(places[0][0]) for node in nodes)
        one.set("key", "value")

        assert [0, 1] == sorted(rank for _, rank, _ in places)
        assert {(places[0][0], 2)} == {(version, size) for version, _, size in places}
        assert b"value" == other.get("key")
        nodes[0].set_closed()
        with pytest.raises(RendezvousClosedError):
            nodes[1].rendezvous_barrier()
        assert [True, True] == [node.shutdown() for node in nodes]


def test_a_store_for_a_round_has_torchs_prefix_where_none_is_given(etcd: EtcdServer) -> None:
    rendezvous = EtcdRendezvous.of(RendezvousParameters("etcd", etcd.get_endpoint(), "job", 1, 1))

    assert "/torchelastic/p2p/run_job/rdzv/v_3/kv" == rendezvous.setup_kv_store(3).prefix


def test_a_client_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an etcd client of elasticlib: give host:port"):
        EtcdRendezvous(object(), "/jobs", "job", 1, 1, 60, 1)  # type: ignore[arg-type]


def test_a_handler_on_etcd_has_the_address_that_it_was_given() -> None:
    handler = EtcdRendezvousHandler(EtcdRendezvous("etcd0:2379", "/jobs", "job", 1, 2, 60, 1), "node7")

    assert ("node7", "/jobs") == (handler.job.local_addr, handler.job.options["etcd_prefix"])
    assert handler.job.node.startswith("node7/")
    handler._release()


def test_a_server_is_stopped_with_its_folder(tmp_path: Path) -> None:
    import subprocess

    folder = tmp_path / "data"
    folder.mkdir()
    process = subprocess.Popen(["sleep", "60"])

    stop_etcd(process, str(folder))
    stop_etcd(process)

    assert process.poll() is not None
    assert not folder.exists()
