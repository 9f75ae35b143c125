"""Sockets that a node binds for a round, and the addresses that it reports for itself."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from elasticlib.rendezvous.net._node_info import BoundNodeInfo, FixedNodeInfo, own_addresses


def drop(offer: BoundNodeInfo) -> None:
    listener = offer.listener()
    assert listener is not None
    listener.close()


def test_a_job_on_this_machine_listens_on_loopback_only() -> None:
    offer = BoundNodeInfo()
    descriptor = offer.describe(2, "trainer")
    listener = offer.listener()

    assert listener is not None
    with listener:
        assert ("127.0.0.1", descriptor.store_port) == listener.getsockname()
    assert (2, "trainer", ("127.0.0.1",)) == (descriptor.slots, descriptor.role, descriptor.addresses)


def test_the_socket_accepts_connections_at_once() -> None:
    offer = BoundNodeInfo()
    descriptor = offer.describe(1, "trainer")

    with socket.create_connection(("127.0.0.1", descriptor.store_port), timeout=10):
        drop(offer)


def test_each_round_gets_a_socket_of_its_own() -> None:
    offer = BoundNodeInfo()
    first = offer.describe(1, "trainer")
    second = offer.describe(1, "trainer")

    assert first.store_port != second.store_port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first.store_port), timeout=10)
    drop(offer)


def test_the_socket_is_handed_over_once() -> None:
    offer = BoundNodeInfo()
    offer.describe(1, "trainer")
    listener = offer.listener()

    assert listener is not None
    listener.close()
    assert offer.listener() is None


def test_peers_on_other_machines_get_all_addresses_best_first() -> None:
    offer = BoundNodeInfo(lambda: "192.0.2.7", index=3, hosts=lambda: True)
    descriptor = offer.describe(1, "trainer")
    listener = offer.listener()

    assert listener is not None
    with listener:
        assert not ipaddress.ip_address(listener.getsockname()[0].removeprefix("::ffff:")).is_loopback
    assert "192.0.2.7" == descriptor.addresses[0]
    assert set(own_addresses(ipv6=True)) <= set(descriptor.addresses)
    assert (3, True) == (descriptor.index, descriptor.hosts)


def test_own_addresses_are_addresses_that_others_can_use() -> None:
    for address in own_addresses(ipv6=True):
        assert not ipaddress.ip_address(address).is_loopback


def test_nothing_is_bound_if_the_jobs_store_serves_the_workers() -> None:
    offer = FixedNodeInfo("node1", lambda: 29500, 0, lambda: True)

    assert (("node1",), 29500, 0) == (
        offer.describe(1, "trainer").addresses,
        offer.describe(1, "trainer").store_port,
        offer.describe(1, "trainer").index,
    )
    assert offer.listener() is None


def test_a_node_with_the_stores_address_shows_its_presence_at_its_own() -> None:
    """A connection to the store's address would prove nothing about this node."""
    made = FixedNodeInfo("store", lambda: 29400, 1, lambda: False, presence_port=4000, own_address=lambda: "10.0.0.2")
    descriptor = made.describe(1, "trainer")

    assert (("store",), 4000, "10.0.0.2") == (
        descriptor.addresses,
        descriptor.presence_port,
        descriptor.presence_address,
    )


def test_a_node_with_an_address_of_its_own_offers_its_presence_socket() -> None:
    offer = BoundNodeInfo(presence_port=7000)
    described = offer.describe(1, "trainer")
    listener = offer.listener()
    assert listener is not None
    listener.close()

    assert 7000 == described.presence_port
