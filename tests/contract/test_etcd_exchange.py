"""The exchange on a real etcd server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._exchange import Exchange, RequestRefusedError
from elasticlib.rendezvous.stores._election import CompareAndSetExchange
from elasticlib.rendezvous.stores._keys import Keys
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer
from tests.contract.test_exchange import LONG, ExchangeContract, texts

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]


class TestEtcd(ExchangeContract):
    @pytest.fixture(autouse=True)
    def server(self, etcd: EtcdServer) -> None:
        self.endpoint = etcd.get_endpoint()

    def backend(self, run_id: str) -> EtcdBackend:
        return EtcdBackend(NodeJob(run_id=run_id, node="n", backend="etcd", endpoint=self.endpoint))

    def connect(self) -> CompareAndSetExchange:
        return self.backend(uuid.uuid4().hex).dial(LONG)

    @pytest.fixture
    def keys(self) -> Iterator[Keys]:
        keys = self.backend("any").connect(LONG)
        yield keys
        keys.close()

    def test_two_jobs_of_one_server_stay_apart(self) -> None:
        names = [uuid.uuid4().hex + tail for tail in ("", "/a", "/a/..", "%2Fa", " ", "_", "ä")]
        exchanges = [self.backend(name).dial(LONG) for name in names]
        for name, exchange in zip(names, exchanges, strict=True):
            exchange.write({"key": name.encode()})
            exchange.post(name.encode())

        for name, exchange in zip(names, exchanges, strict=True):
            assert [name.encode()] == exchange.read(["key"])
            assert [name.encode()] == texts(list(exchange.receive(LONG)))

    def test_a_closed_connection_is_a_clear_error(self, exchange: Exchange) -> None:
        exchange.close()

        with pytest.raises(RendezvousConnectionError, match=r"closed$"):
            exchange.read(["key"])

    def test_a_wait_ends_when_another_thread_closes_the_connection(self, exchange: CompareAndSetExchange) -> None:
        exchange.read(["key"])
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(exchange.wait, "key", None)
            stopper = threading.Timer(0.1, exchange.close)
            stopper.start()

            with pytest.raises(RendezvousConnectionError, match=r"closed"):
                waiter.result(LONG)
        stopper.join()

    def test_found_value_is_read_with_its_wait_unless_changed_by_itself(self, exchange: CompareAndSetExchange) -> None:
        other = exchange.clone()
        exchange.write({"key": b"1"})
        assert exchange.wait("key", LONG)
        other.write({"key": b"2"})
        assert exchange.read(["key"]) in ([b"1"], [b"2"])
        assert [b"2"] == exchange.read(["key"])

        assert exchange.wait("key", LONG)
        exchange.write({"key": b"3"})
        assert [b"3"] == exchange.read(["key"])
        assert exchange.wait("key", LONG)
        exchange.delete(["key"])
        assert [None] == exchange.read(["key"])

    def test_client_reconnects_after_the_server_closed_an_idle_connection(self, keys: Keys) -> None:
        keys.write({"/some/key": b"1"})
        line = keys._line  # type: ignore[attr-defined]
        line._kept.sock.shutdown(2)

        (item,), _ = keys.read(["/some/key"])

        assert item is not None
        assert b"1" == item.data

    def test_a_key_is_swapped_only_at_its_version(self, keys: Keys) -> None:
        path = f"/swap/{uuid.uuid4().hex}"

        first = keys.swap(path, b"1", 0)
        assert first is not None
        assert keys.swap(path, b"2", 0) is None
        second = keys.swap(path, b"2", first)
        assert second is not None
        assert second > first
        assert keys.swap(path, b"3", first) is None

        (item,), _ = keys.read([path])
        assert item is not None
        assert (b"2", second) == (item.data, item.version)

    def test_deleted_key_is_not_swapped(self, keys: Keys) -> None:
        path = f"/swap/{uuid.uuid4().hex}"
        version = keys.swap(path, b"1", 0)
        keys.delete([path])

        assert version is not None
        assert keys.swap(path, b"2", version) is None

    def test_leased_key_has_only_one_owner_at_a_time(self, keys: Keys) -> None:
        path = f"/hold/{uuid.uuid4().hex}"
        first = keys.seize(path, "a", 2.0)

        assert first is not None
        assert keys.seize(path, "b", 2.0) is None
        assert keys.renew(first)
        keys.release(first)
        assert not keys.holds(first)
        second = keys.seize(path, "a", 2.0)
        assert second is not None
        assert not keys.holds(first)
        assert not keys.renew(first)
        keys.release(first)
        assert keys.holds(second)
        keys.release(second)

    def test_leased_key_is_removed_when_nobody_renews_its_lease(self, keys: Keys) -> None:
        path = f"/hold/{uuid.uuid4().hex}"
        hold = keys.seize(path, "a", 1.0)
        assert hold is not None
        (value,), version = keys.read([path])
        assert value is not None

        keys.changed(path, version, LONG)

        assert not keys.holds(hold)
        assert not keys.renew(hold)

    def test_a_folder_is_cleared_with_all_that_it_holds(self, keys: Keys) -> None:
        root = f"/clear/{uuid.uuid4().hex}"
        keys.write({f"{root}/a/b": b"1", f"{root}/c": b"2", f"{root}x": b"3"})
        keys.clear(root)

        items, _ = keys.read([f"{root}/a/b", f"{root}/c", f"{root}x"])

        assert [None, None, b"3"] == [item and item.data for item in items]

    def test_value_that_the_server_refuses_raises_a_clear_error(self, keys: Keys) -> None:
        with pytest.raises(RequestRefusedError, match=r"http://127\.0\.0\.1:\d+ refused .*: .*larger?") as refused:
            keys.write({"/big": b"\xff" * 3_000_000})

        assert refused.value.too_large
        keys.write({"/big": b"less"})  # the connection goes on

    def test_keys_of_a_job_do_not_stay_for_ever(self, keys: Keys) -> None:
        keys.write({"/kept/key": b"1"})
        lease = keys._lease()  # type: ignore[attr-defined]

        reply = keys._call("/kv/lease/timetolive", {"ID": str(lease), "keys": True})  # type: ignore[attr-defined]

        assert "L2tlcHQva2V5" in reply["keys"]
        assert 7100 < int(reply["TTL"]) <= 7200

    def test_all_connections_of_a_node_share_a_lease(self) -> None:
        backend = self.backend("any")
        one, other = backend.connect(LONG), backend.connect(LONG)

        leases = {keys._lease() for keys in (one, other, one.clone())}  # type: ignore[attr-defined]

        assert 1 == len(leases)

    def test_a_lease_that_somebody_revoked_is_replaced(self, keys: Keys) -> None:
        keys._call("/kv/lease/revoke", {"ID": str(keys._lease())})  # type: ignore[attr-defined]

        with pytest.raises(RendezvousConnectionError, match="requested lease not found"):
            keys.write({"/lease/key": b"1"})
        keys.write({"/lease/key": b"1"})
