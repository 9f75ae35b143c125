"""Rows 157 to 159: etcd by the names of torch's classes."""

from __future__ import annotations

import base64
import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.checklist.peers import Peer

ABANDONED = "needs python-etcd, whose last release is of 2017"


@pytest.fixture
def etcd(peer: Peer) -> Iterator[Any]:
    server = peer.module("rendezvous.etcd_server").EtcdServer()
    server.start()
    yield server
    server.stop()


def ask(endpoint: str, verb: str, **body: str) -> dict[str, Any]:
    """Return etcd's own answer, by its v3 API."""
    request = urllib.request.Request(f"http://{endpoint}/v3{verb}", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def leaves(endpoint: str, folder: str) -> list[dict[str, Any]]:
    """Everything in a folder."""
    first, last = (base64.b64encode(f"{folder}{end}".encode()).decode() for end in "/0")
    found: list[dict[str, Any]] = ask(endpoint, "/kv/range", key=first, range_end=last)["kvs"]
    return found


@pytest.mark.row(157, peer_cannot=ABANDONED)
@pytest.mark.slow
def test_a_state_is_created_once_compared_by_index_and_expires(peer: Peer, etcd: Any) -> None:
    module = peer.module("rendezvous.etcd_rendezvous_backend")
    params = peer.module("rendezvous").RendezvousParameters("etcd-v2", etcd.get_endpoint(), "job", 1, 2)
    backend, store = module.create_backend(params)
    other, _ = module.create_backend(params)

    assert "etcd-v2" == backend.name
    assert backend.get_state() is None
    state, first, created = backend.set_state(b"1")
    assert (b"1", True) == (state, created)
    assert (b"1", first, False) == other.set_state(b"2")
    _, second, written = other.set_state(b"2", first)
    assert written
    assert (b"2", second, False) == backend.set_state(b"3", first)
    assert (b"2", second) == backend.get_state()
    (leaf,) = leaves(etcd.get_endpoint(), "/torch/elastic/rendezvous")
    assert second == int(leaf["mod_revision"])
    lease = ask(etcd.get_endpoint(), "/kv/lease/timetolive", ID=leaf["lease"])
    assert 7000 < int(lease["TTL"]) <= 7200

    short = module.EtcdRendezvousBackend(store.client, "short", "/short", ttl=1)
    short.set_state(b"1")
    assert peer.wait_until(lambda: short.get_state() is None)


NODE = """
import os, signal, sys
from {elastic}.rendezvous import RendezvousParameters
from {elastic}.rendezvous.etcd_rendezvous import create_rdzv_handler

params = RendezvousParameters("etcd", sys.argv[1], "job", 2, 2, timeout=60, last_call_timeout=1)
info = create_rdzv_handler(params).next_rendezvous()
print(info.rank, info.world_size, flush=True)
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.row(158, peer_cannot=ABANDONED)
@pytest.mark.slow
@pytest.mark.sampled(0.3)
def test_nodes_meet_and_the_round_of_a_dead_one_makes_way_for_the_next(peer: Peer, etcd: Any) -> None:
    rendezvous, module = peer.module("rendezvous"), peer.module("rendezvous.etcd_rendezvous")
    endpoint = etcd.get_endpoint()
    with ThreadPoolExecutor(1) as pool:
        handler = module.create_rdzv_handler(
            rendezvous.RendezvousParameters("etcd", endpoint, "job", 2, 2, timeout=60, last_call_timeout=1)
        )
        dying = pool.submit(peer.python, NODE, endpoint, "dies")
        first = handler.next_rendezvous()
        ended = dying.result()

        staying = pool.submit(peer.python, NODE, endpoint, "stays")
        assert peer.wait_until(lambda: handler.num_nodes_waiting() > 0)
        second = handler.next_rendezvous()
        stayed = staying.result()

    assert -signal.SIGKILL == ended.returncode
    assert ("etcd", "job") == (handler.get_backend(), handler.get_run_id())
    for info, other in ((first, ended), (second, stayed)):
        assert {(0, 2), (1, 2)} == {(info.rank, info.world_size), tuple(map(int, other.out.split()))}
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(rendezvous.RendezvousClosedError):
        handler.next_rendezvous()
    handler.shutdown()


@pytest.mark.row(159, peer_cannot=ABANDONED)
@pytest.mark.slow
def test_the_store_on_etcd_gets_waits_checks_adds_and_gives_up(peer: Peer, etcd: Any) -> None:
    store = peer.module("rendezvous.etcd_store").EtcdStore(etcd.get_client(), "/some/where", timedelta(seconds=0.2))
    other = peer.module("rendezvous.etcd_store").EtcdStore(etcd.get_client(), "/some/where")
    store.set("text", "word")
    store.set("bytes", b"\xff\x00")

    assert [b"word", b"\xff\x00"] == [store.get("text"), other.get("bytes")]
    assert [2, 5, 4] == [store.add("number", 2), other.add("number", 3), store.add("number", -1)]
    assert [True, False] == [store.check(["text", "number"]), store.check(["text", "absent"])]
    store.wait(["text", "bytes"])
    with pytest.raises(LookupError):
        store.get("absent")
    with pytest.raises(LookupError):
        store.wait(["text", "absent"], timedelta(seconds=0.1))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(other.get, "late")
        store.set("late", "here")

        assert b"here" == waiter.result(30)
