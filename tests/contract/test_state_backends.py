"""The shared state on a real etcd server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous.handlers._etcd import EtcdRendezvousBackend
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._server import EtcdServer
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys

pytestmark = pytest.mark.slow

LONG = 30.0


@pytest.fixture
def keys(etcd: EtcdServer) -> Iterator[V3Keys]:
    job = Job(run_id="any", node="n", backend="etcd", endpoint=etcd.get_endpoint())
    keys = EtcdBackend(job).connect(LONG)
    yield keys
    keys.close()


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


def test_there_is_no_state_at_first(keys: V3Keys, run_id: str) -> None:
    backend = EtcdRendezvousBackend(keys, run_id)

    assert backend.get_state() is None
    assert backend.set_state(b"late", 7) is None
    assert backend.set_state(b"late", b"token of nothing") is None


def test_the_first_writer_without_a_token_wins(keys: V3Keys, run_id: str) -> None:
    one, other = EtcdRendezvousBackend(keys, run_id), EtcdRendezvousBackend(keys, run_id)

    first, second = one.set_state(b"same"), other.set_state(b"same")

    assert first is not None and second is not None
    assert (b"same", True) == (first[0], first[2])
    assert (*first[:2], False) == second
    assert first[:2] == other.get_state()


@pytest.mark.parametrize("state", [b"", b"\xff\x00", b"{}" * 10_000])
def test_a_write_needs_the_token_of_the_present_state(keys: V3Keys, run_id: str, state: bytes) -> None:
    backend = EtcdRendezvousBackend(keys, run_id)
    first = backend.set_state(b"1")
    assert first is not None
    second = backend.set_state(state, first[1])
    refused = [backend.set_state(b"3", token) for token in (first[1], 0, -1, "x", None)]

    assert second is not None
    assert (state, True) == (second[0], second[2])
    assert [(*second[:2], False)] * 5 == refused


def test_jobs_and_prefixes_are_apart(keys: V3Keys, run_id: str) -> None:
    EtcdRendezvousBackend(keys, run_id).set_state(b"1")

    assert EtcdRendezvousBackend(keys, f"{run_id}/a").get_state() is None
    assert EtcdRendezvousBackend(keys, run_id, "/other").get_state() is None


def test_a_job_without_a_name_is_refused(keys: V3Keys) -> None:
    with pytest.raises(ValueError, match="run_id=''"):
        EtcdRendezvousBackend(keys, "")
