"""A node with a place of its own that dies and is started again before its death is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.process.launches import Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

HEARTBEAT = 3.0


@pytest.fixture
def nodes() -> Iterator[list[Launch]]:
    """The launches of a test, which are closed after it."""
    launches: list[Launch] = []
    yield launches
    for launch in launches:
        launch.close()


def start(nodes: list[Launch], port: int, rank: int) -> Launch:
    options = ["--nnodes", "2", "--rdzv-backend", "static", "--node-rank", str(rank)]
    nodes.append(Launch(port, "job", options, heartbeat_timeout=HEARTBEAT))
    return nodes[-1]


def die_as_a_machine_does(node: Launch) -> None:
    """No process is left that could tell of it."""
    os.kill(node.rendezvous_process(), signal.SIGKILL)
    node.popen.kill()
    node.popen.wait()


def test_its_replacement_gets_its_place_once_its_heartbeat_ran_out(nodes: list[Launch]) -> None:
    port = free_port()
    first, second = start(nodes, port, 0), start(nodes, port, 1)
    first.at_work(), second.at_work()
    die_as_a_machine_does(second)

    replacement = start(nodes, port, 1)

    replacement.at_work()  # a slow machine may start it after the loss was noticed
    first.finish()
    replacement.finish()
    assert [0, 0] == [first.ends()[0], replacement.ends()[0]], (first.log, replacement.log)
    assert 2 == first.log.count("at work")


def test_a_second_node_with_the_place_of_a_living_one_is_refused(nodes: list[Launch]) -> None:
    port = free_port()
    first, second = start(nodes, port, 0), start(nodes, port, 1)
    first.at_work(), second.at_work()

    status, output = start(nodes, port, 1).ends()

    assert (1, True) == (status, "node rank 1 was given twice: node" in output), output
    first.finish()
    second.finish()
    assert [0, 0] == [first.ends()[0], second.ends()[0]]
    assert 1 == first.log.count("at work")
