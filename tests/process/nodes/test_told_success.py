"""A node whose success was told: whatever becomes of its contact with the job then, it has its results."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.launches import Program, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "told_node.py"


class Node(Program):
    """A launcher of its own."""

    def __init__(self, endpoint: str, folder: Path, part: str) -> None:
        super().__init__(str(SCRIPT), endpoint, str(folder), part)

    def results(self) -> str:
        status, output = self.ends()
        assert 0 == status, output
        return next(line for line in self.log if line.startswith('{"'))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes of one job; the first hosts its store, and its worker ends when the file ``go`` is there."""
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = Node(endpoint, tmp_path, "host"), Node(endpoint, tmp_path, "other")
    yield nodes
    for node in nodes:
        node.close()


def test_a_node_that_loses_contact_after_its_success_returns_its_results(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    """
    Its sidecar stands still, so it asks for another seat; then the other node ends well, too.

    That one's sidecar, which hosts the store, is killed before it has passed this on. Nothing runs twice.
    """
    host, other = pair
    other.wait_for_line("workers are SUCCEEDED")
    process = other.rendezvous_process()
    os.kill(process, signal.SIGSTOP)
    other.wait_for_line("waits for its rank assignment", times=2)
    os.kill(process, signal.SIGCONT)
    process = host.rendezvous_process()
    os.kill(process, signal.SIGSTOP)
    (tmp_path / "go").touch()
    host.wait_for_line("workers are SUCCEEDED")
    os.kill(process, signal.SIGKILL)

    results = [host.results(), other.results()]

    assert ['{"0": "result I of rank 0"}', '{"1": "result I of rank 1"}'] == results
