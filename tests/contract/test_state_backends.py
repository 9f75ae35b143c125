"""Guarantees of a job's shared state, on each of torch's stores and on a real etcd server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend
from elasticlib.rendezvous.handlers._etcd import EtcdRendezvousBackend
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys

pytestmark = pytest.mark.slow

LONG = 30.0
Make: TypeAlias = Callable[[str], RendezvousBackend]


def torch_store(kind: str, folder: Path) -> Any:
    from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]

    if kind == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return FileStore(str(folder / "store"), 1) if kind == "file" else HashStore()


@pytest.fixture
def keys(etcd: EtcdServer) -> Iterator[V3Keys]:
    keys = EtcdBackend(NodeJob(run_id="any", node="n", backend="etcd", endpoint=etcd.get_endpoint())).connect(LONG)
    yield keys
    keys.close()


@pytest.fixture(params=["tcp", "file", "hash", "etcd"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the backend of a job, by the job's id; all are in one store."""
    if request.param == "etcd":
        keys = request.getfixturevalue("keys")
        return lambda run_id: EtcdRendezvousBackend(keys, run_id)
    store = torch_store(request.param, tmp_path)
    return lambda run_id: C10dRendezvousBackend(store, run_id)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


def test_new_run_has_no_state(make: Make, run_id: str) -> None:
    backend = make(run_id)

    assert backend.get_state() is None
    assert backend.set_state(b"late", 7) is None
    assert backend.set_state(b"late", b"token of nothing") is None


def test_the_first_writer_without_a_token_wins(make: Make, run_id: str) -> None:
    one, other = make(run_id), make(run_id)

    first, second = one.set_state(b"same"), other.set_state(b"same")

    assert first is not None and second is not None
    assert (b"same", True) == (first[0], first[2])
    assert (*first[:2], False) == second
    assert first[:2] == other.get_state()


@pytest.mark.parametrize("state", [b"", b"\xff\x00", b"{}" * 10_000])
def test_a_write_needs_the_token_of_the_present_state(make: Make, run_id: str, state: bytes) -> None:
    backend = make(run_id)
    first = backend.set_state(b"1")
    assert first is not None
    second = backend.set_state(state, first[1])
    refused = [backend.set_state(b"3", token) for token in (first[1], 0, -1, "x", None)]

    assert second is not None
    assert (state, True) == (second[0], second[2])
    assert [(*second[:2], False)] * 5 == refused


def test_jobs_are_apart(make: Make, run_id: str) -> None:
    make(run_id).set_state(b"1")

    assert make(f"{run_id}/a").get_state() is None


def test_prefixes_on_etcd_are_apart(keys: V3Keys, run_id: str) -> None:
    EtcdRendezvousBackend(keys, run_id).set_state(b"1")

    assert EtcdRendezvousBackend(keys, run_id, "/other").get_state() is None


@pytest.mark.parametrize("scribble", ["x", "x.y", "=.=", "gASV"])
@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_a_scribble_is_a_state_error(kind: str, tmp_path: Path, scribble: str) -> None:
    store = torch_store(kind, tmp_path)
    store.set("elasticlib/state/job", scribble)

    with pytest.raises(RendezvousStateError, match="instead of the state of a rendezvous"):
        C10dRendezvousBackend(store, "job").get_state()


def test_state_in_a_lost_store_raises_connection_error(tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosted = torch_store("tcp", tmp_path)
    backend = C10dRendezvousBackend(TCPStore("127.0.0.1", hosted.port, wait_for_workers=False), "job")
    del hosted

    with pytest.raises(RendezvousConnectionError, match="shared state failed"):
        backend.get_state()
