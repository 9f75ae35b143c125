"""Rows 186 and 191 to 195: the registry of handlers, meetings by a store, macros, data for elastic training."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.checklist.peers import Peer
from tests.waiting import together


@pytest.mark.row(186)
@pytest.mark.slow
def test_the_registry_has_one_creator_for_a_name_and_checks_what_it_makes(peer: Peer) -> None:
    rendezvous = peer.module("rendezvous")

    class Handler(rendezvous.RendezvousHandler):  # type: ignore[misc, name-defined]
        def get_backend(self) -> str:
            return "one"

        def next_rendezvous(self) -> None: ...
        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None: ...
        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "job"

        def shutdown(self) -> bool:
            return True

    def first(params: Any) -> Any:
        return Handler()

    def second(params: Any) -> Any:
        return Handler()

    registry = rendezvous.RendezvousHandlerRegistry()
    registry.register("one", first)
    registry.register("one", first)
    registry.register("other", second)
    made = registry.create_handler(rendezvous.RendezvousParameters("one", "", "job", 1, 1))

    assert isinstance(made, Handler)
    with pytest.raises(ValueError):
        registry.register("one", second)
    with pytest.raises(RuntimeError):
        registry.create_handler(rendezvous.RendezvousParameters("other", "", "job", 1, 1))
    with pytest.raises(ValueError):
        registry.create_handler(rendezvous.RendezvousParameters("unknown", "", "job", 1, 1))


@pytest.fixture
def server() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: Any) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))


@pytest.mark.row(191)
@pytest.mark.slow
def test_ranks_meet_by_a_store_and_a_timeout_names_the_missing(peer: Peer, server: Any) -> None:
    store = peer.module("utils.store")

    def meet(rank: int) -> Any:
        mine = client(server)
        data = store.synchronize(mine, str(rank).encode(), rank, 3, "data/", 30)
        again = store.get_all(mine, rank, "data/", 3)
        store.barrier(mine, 3, "meet", 30, rank=rank)
        return [[bytes(each) for each in found] for found in (data, again)]

    def wait(rank: int) -> Any:
        store.barrier(client(server), 4, "fail", 0.3, rank=rank, rank_tracing_decoder="node{}".format, trace_timeout=5)

    met = together(3, meet)
    errors = together(3, wait)

    assert [[[b"0", b"1", b"2"]] * 2] * 3 == met
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert "missing_ranks=[node3]" in str(errors[0])


@pytest.mark.row(192)
@pytest.mark.slow
def test_store_for_several_needs_a_port_and_a_random_one_is_found(peer: Peer) -> None:
    create = peer.module("utils.distributed").create_c10d_store

    with pytest.raises(ValueError):
        create(is_server=True, server_addr="localhost", server_port=-1, world_size=2)
    made = together(20, lambda _: create(is_server=True, server_addr="localhost", timeout=30))
    for number, store in enumerate(made):
        store.set("key", str(number))

    assert [str(number).encode() for number in range(20)] == [bytes(store.get("key")) for store in made]
    assert 20 == len({store.port for store in made})


@pytest.mark.row(193)
@pytest.mark.slow
def test_macros_are_filled_into_texts_alone(peer: Peer) -> None:
    macros = peer.module("utils").macros
    path = object()

    assert ["--rank=3", 7, path, "$other"] == macros.substitute(
        [f"--rank={macros.local_rank}", 7, path, "$other"], local_rank="3"
    )


@pytest.mark.row(194)
@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "replicas", "start"), [(0, 1, 0), (0, 3, 5), (4, 4, 6), (2, 2, 22)])
def test_the_sampler_deals_out_the_rest_of_a_shuffled_epoch(peer: Peer, epoch: int, replicas: int, start: int) -> None:
    import torch
    from torch.utils.data import DistributedSampler

    sampler = peer.module("utils.data").ElasticDistributedSampler
    size = 25
    order = (torch.randperm(size - start, generator=torch.Generator().manual_seed(epoch)) + start).tolist()
    order += order[: -len(order) % replicas]

    for rank in range(replicas):
        mine = sampler(range(size), replicas, rank, start)
        mine.set_epoch(epoch)
        assert isinstance(mine, DistributedSampler)
        assert order[rank::replicas] == list(mine)
        assert len(order) // replicas == len(mine)
    with pytest.raises(ValueError):
        sampler(range(size), replicas, 0, size)
    with pytest.raises(TypeError):
        sampler(object(), replicas, 0)


@pytest.mark.row(195)
@pytest.mark.slow
def test_cycling_iterator_runs_from_its_first_epoch_to_the_last(peer: Peer) -> None:
    cycling = peer.module("utils.data").CyclingIterator

    def epoch(number: int) -> Iterator[tuple[int, str]]:
        return iter([(number, "a"), (number, "b")])

    assert [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")] == list(cycling(3, epoch))
    assert [(2, "a"), (2, "b")] == list(cycling(3, epoch, start_epoch=2))
