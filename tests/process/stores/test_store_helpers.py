"""The helpers that need torch: stores, meetings, samplers."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from torch.distributed import DistNetworkError

from elasticlib.elastic.rendezvous.etcd_store import EtcdStore
from elasticlib.errors import ConfigError, RendezvousTimeoutError
from elasticlib.utils.data import ElasticDistributedSampler
from elasticlib.utils.distributed import create_c10d_store, get_socket_with_port
from elasticlib.utils.store import barrier, get_all, store_timeout, synchronize
from tests.waiting import together

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

LONG = 30.0


@pytest.fixture
def server() -> Any:
    return create_c10d_store(True, "127.0.0.1", timeout=LONG)


def store_of_the_group() -> Any:
    """The store that this rank's process group has met in."""
    return torch.distributed.distributed_c10d._get_default_store()


def test_the_time_limit_is_as_before_after_a_block_that_raised(server: Any) -> None:
    server.set_timeout(timedelta(seconds=7))

    with pytest.raises(KeyError), store_timeout(server, 3):
        assert timedelta(seconds=3) == server.timeout
        raise KeyError
    assert timedelta(seconds=7) == server.timeout


def test_store_on_etcd_uses_the_time_limit_that_is_set() -> None:
    class Empty:
        """A server in which nothing ever comes."""

        def read(self, paths: list[str]) -> tuple[list[None], int]:
            return [None] * len(paths), 0

    store = EtcdStore(Empty(), "job", timedelta(seconds=0.25))  # type: ignore[arg-type]
    assert timedelta(seconds=0.25) == store.timeout

    with store_timeout(store, 0):
        assert timedelta(0) == store.timeout
        with pytest.raises(LookupError, match="did not appear within 0 s"):
            store.get("key")
    assert timedelta(seconds=0.25) == store.timeout
    assert timedelta(seconds=300) == EtcdStore(Empty(), "job").timeout  # type: ignore[arg-type]
    with pytest.raises(LookupError, match="did not appear within 0 s"):
        store.wait(["key"], timedelta(0))


@pytest.mark.elastic(nproc=4)
def test_all_ranks_get_the_data_of_all(rank: int, world_size: int) -> None:
    got = synchronize(store_of_the_group(), str(rank).encode(), rank, world_size, "data/", LONG)

    assert [b"0", b"1", b"2", b"3"] == got


def test_missing_data_raises_runtime_error(server: Any) -> None:
    server.set_timeout(timedelta(milliseconds=50))
    server.set("data/0", "x")

    with pytest.raises(RuntimeError):
        get_all(server, 0, "data/", 2)


@pytest.mark.elastic(nproc=4)
def test_every_rank_learns_who_is_missing(rank: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        barrier(store_of_the_group(), 6, "meet", 0.2, rank=rank, rank_tracing_decoder=lambda each: f"node{each}")

    assert "missing_ranks=[node4, node5]" == str(caught.value)[-29:-1]


@pytest.mark.elastic(nproc=4)
def test_a_barrier_waits_for_the_last_rank(rank: int, world_size: int) -> None:
    store = store_of_the_group()
    if rank == world_size - 1:
        store.set("came", "late")

    barrier(store, world_size, "meet", LONG)

    assert store.check(["came"])


def test_at_most_sixteen_missing_ranks_are_named(server: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        barrier(server, 1000, "meet", 0.05, rank=0)

    assert f"missing_ranks=[{', '.join(map(str, range(1, 17)))}]" in str(caught.value)


def test_a_barrier_that_failed_leaves_the_stores_own_limit(server: Any) -> None:
    server.set_timeout(timedelta(seconds=7))

    with pytest.raises(RuntimeError):
        barrier(server, 2, "meet", 0.05)
    assert timedelta(seconds=7) == server.timeout


def test_a_decoder_needs_a_rank(server: Any) -> None:
    with pytest.raises(AssertionError, match="has no effect without a rank"):
        barrier(server, 2, "meet", rank_tracing_decoder=str)


def test_callers_of_a_store_wait_for_each_other() -> None:
    with get_socket_with_port() as free:
        port = free.getsockname()[1]

    found = together(3, lambda number: create_c10d_store(number == 0, "127.0.0.1", port, 3, LONG))

    assert [1, 2, 3] == [store.add("here", 1) for store in found], found


@pytest.mark.parametrize(("retries", "taken", "opens"), [(3, 2, True), (3, 3, False), (0, 0, True), (0, 1, False)])
def test_a_port_that_was_taken_meanwhile_is_worth_another_one(
    monkeypatch: pytest.MonkeyPatch, retries: int, taken: int, opens: bool
) -> None:
    """One attempt is made however few are asked for."""
    error = DistNetworkError("The server socket has failed to listen: EADDRINUSE, message: address already in use")
    attempts: list[object] = [error] * taken
    plain: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]

    def opened(*args: Any, **options: Any) -> object:
        if attempts:
            raise attempts.pop()  # type: ignore[misc]
        return plain(*args, **options)

    monkeypatch.setattr(torch.distributed, "TCPStore", opened)

    if opens:
        assert create_c10d_store(True, "127.0.0.1", retries=retries, wait_for_workers=False).port > 0
    else:
        with pytest.raises(DistNetworkError):
            create_c10d_store(True, "127.0.0.1", retries=retries, wait_for_workers=False)


def test_another_fault_of_the_network_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def opened(*args: Any, **options: Any) -> object:
        calls.append(args)
        raise DistNetworkError("no route to host")

    monkeypatch.setattr(torch.distributed, "TCPStore", opened)

    with pytest.raises(DistNetworkError, match="no route"):
        create_c10d_store(True, "127.0.0.1", wait_for_workers=False)
    assert 1 == len(calls)


def test_missing_caller_makes_the_host_of_the_store_time_out() -> None:
    server = create_c10d_store(True, "127.0.0.1", wait_for_workers=False)

    with pytest.raises(RendezvousTimeoutError, match=r"not all of the 2 callers connected .* within 0.05 s"):
        create_c10d_store(False, "127.0.0.1", server.port, 2, 0.05)


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("start", [0, 5, 22])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_a_sampler_deals_out_what_is_left_in_turn(epoch: int, start: int, replicas: int) -> None:
    data = list(range(23))
    samplers: list[Any] = [ElasticDistributedSampler(data, replicas, rank, start) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)

    shares = [list(sampler) for sampler in samplers]

    assert [len(samplers[0])] * replicas == [len(share) for share in shares]
    dealt = [index for turn in zip(*shares, strict=True) for index in turn]
    assert set(range(start, 23)) == set(dealt) == set(dealt[: 23 - start])
    assert dealt[23 - start :] == (dealt[: 23 - start] * replicas)[: len(dealt) - (23 - start)]


@pytest.mark.elastic(nproc=4)
def test_the_ranks_of_a_group_share_a_samplers_data(rank: int, world_size: int) -> None:
    mine = list(ElasticDistributedSampler(list(range(23)), start_index=5))
    shares: list[Any] = [None] * world_size

    torch.distributed.all_gather_object(shares, mine)  # type: ignore[attr-defined]

    assert [len(mine)] * world_size == [len(share) for share in shares]
    assert set(range(5, 23)) == {index for share in shares for index in share}


def test_a_sampler_is_a_distributed_sampler_that_pickles() -> None:
    from torch.utils.data.distributed import DistributedSampler

    sampler: Any = ElasticDistributedSampler([1, 2, 3], 2, 1)

    assert isinstance(sampler, DistributedSampler)
    assert list(sampler) == list(pickle.loads(pickle.dumps(sampler)))


def test_a_start_beyond_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="start_index=3 must be below 3"):
        ElasticDistributedSampler([1, 2, 3], 2, 1, 3)


def test_a_start_before_the_data_begins_at_their_end_as_in_torch() -> None:
    assert {-1, 0, 1, 2} == set(ElasticDistributedSampler([1, 2, 3], 1, 0, -1))


def test_data_without_a_length_are_refused() -> None:
    with pytest.raises(TypeError, match="has no length"):
        ElasticDistributedSampler(iter([1]), 2, 1)
