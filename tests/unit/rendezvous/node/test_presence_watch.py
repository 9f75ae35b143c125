"""The end of a node is reported once it is proven, and in no other case."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Presence
from elasticlib.rendezvous.net._presence import presence_socket
from elasticlib.rendezvous.node._presence_watch import PresenceWatch
from tests.waiting import wait_until

HERE = "127.0.0.1"


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def watch(ended: list[str]) -> Iterator[PresenceWatch]:
    made = PresenceWatch(lambda presence: ended.append(presence.node))
    yield made
    made.close()
    wait_until(lambda: not any(each.name == "elasticlib-presence" for each in threading.enumerate()))


@pytest.fixture
def node() -> Iterator[Callable[[], socket.socket]]:
    made = list[socket.socket]()

    def new() -> socket.socket:
        found = presence_socket(HERE, "store:29400")
        assert found is not None
        made.append(found)
        return found

    yield new
    for each in made:
        each.close()


def presence_of(listener: socket.socket, node: str = "b", address: str = HERE) -> Presence:
    return Presence(node, address, listener.getsockname()[1])


def connections(listener: socket.socket) -> int:
    """Return the number of connections that the kernel has completed, and nobody has accepted."""
    port = f":{listener.getsockname()[1]:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


def await_connection(listener: socket.socket) -> None:
    wait_until(lambda: connections(listener) == 1, what="a connection to the node")


def settle(watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket], *others: Presence) -> None:
    """Wait until the watch has dealt with all before: the end of one more node is reported after it."""
    last = node()
    watch.watch((*others, presence_of(last, "last")))
    await_connection(last)
    last.close()
    wait_until(lambda: "last" in ended)
    ended.remove("last")


def test_a_node_whose_socket_is_closed_has_ended(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    listener = node()
    watch.watch([presence_of(listener)])
    await_connection(listener)
    listener.close()

    wait_until(lambda: ended == ["b"])
    settle(watch, ended, node)
    assert ended == ["b"]


def test_a_node_lives_while_any_process_holds_its_socket(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    listener = node()
    worker = os.dup(listener.fileno())
    presence = presence_of(listener)
    watch.watch([presence])
    await_connection(listener)
    listener.close()
    settle(watch, ended, node, presence)
    assert not ended

    os.close(worker)
    wait_until(lambda: ended == ["b"])


def test_a_refusal_without_a_connection_before_proves_nothing(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    listener = node()
    presence = presence_of(listener)
    listener.close()
    watch.watch([presence])

    settle(watch, ended, node, presence)
    assert not ended


def test_a_connection_that_something_else_has_reset_is_made_again(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    listener = node()
    presence = presence_of(listener)
    watch.watch([presence])
    await_connection(listener)
    listener.accept()[0].close()
    await_connection(listener)
    settle(watch, ended, node, presence)
    assert not ended

    listener.close()
    wait_until(lambda: ended == ["b"])


def test_a_name_is_not_looked_up(watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]) -> None:
    listener = node()
    presence = presence_of(listener, "b", "localhost")
    watch.watch([presence])
    settle(watch, ended, node, presence)

    assert 0 == connections(listener)


def test_a_node_that_is_watched_no_more_is_not_reported(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    listener = node()
    watch.watch([presence_of(listener)])
    await_connection(listener)
    watch.watch([])
    wait_until(lambda: connections(listener) == 0)
    listener.close()

    settle(watch, ended, node)
    assert not ended


def test_the_next_socket_of_a_node_is_watched_in_place_of_the_last(
    watch: PresenceWatch, ended: list[str], node: Callable[[], socket.socket]
) -> None:
    first, second = node(), node()
    watch.watch([presence_of(first)])
    await_connection(first)
    watch.watch([evolve(presence_of(first), port=second.getsockname()[1])])
    await_connection(second)
    first.close()
    settle(watch, ended, node, presence_of(second))

    assert not ended


def test_a_watch_without_nodes_needs_no_thread(ended: list[str]) -> None:
    before = threading.active_count()
    idle = PresenceWatch(lambda presence: ended.append(presence.node))
    idle.watch([])
    idle.close()

    assert before == threading.active_count()


@pytest.mark.parametrize(
    ("address", "endpoint", "bound"),
    [
        (None, "127.0.0.1:29400", "127.0.0.1"),
        (None, "[::1]:29400", "::1"),
        ("127.0.0.1", "node0:29400", "127.0.0.1"),
        (None, "node0:29400", ("::", "0.0.0.0")),
        (None, "/shared/store", ("::", "0.0.0.0")),
    ],
)
def test_a_presence_socket_is_as_wide_as_the_job(
    address: str | None, endpoint: str, bound: str | tuple[str, ...]
) -> None:
    listener = presence_socket(address, endpoint)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] in bound
