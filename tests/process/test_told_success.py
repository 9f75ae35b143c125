"""A node whose success was told: whatever becomes of its contact with the job then, it has its results."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.processes import _reaper
from tests.process import duties
from tests.process.conftest import command_line

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "told_node.py"
LIMIT = 60.0


class Node:
    """A launcher of its own, whose log is read as it comes."""

    def __init__(self, endpoint: str, folder: Path, part: str) -> None:
        self.launcher = subprocess.Popen(
            [sys.executable, str(SCRIPT), endpoint, str(folder), part],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        self.log.extend(iter(self.launcher.stderr.readline, ""))

    def said(self, what: str, times: int = 1) -> bool:
        return sum(what in line for line in self.log) >= times

    def rendezvous(self) -> int:
        """The pid of its sidecar."""
        members = _reaper.descendants(self.launcher.pid)
        (pid,) = [pid for pid, _, _ in members if "elasticlib.rendezvous.sidecar._bridge" in command_line(pid)]
        return pid

    def results(self) -> str:
        assert self.launcher.stdout is not None
        out = self.launcher.stdout.read()
        assert 0 == self.launcher.wait(LIMIT), "".join(self.log)
        return out.strip()

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self._reader.join()
        for stream in (self.launcher.stdout, self.launcher.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes of one job; the first hosts its store, and its worker ends when the file ``go`` is there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
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
    duties.wait_for(lambda: other.said("workers are SUCCEEDED"), LIMIT)
    process = other.rendezvous()
    os.kill(process, signal.SIGSTOP)
    duties.wait_for(lambda: other.said("waits for its rank assignment", times=2), LIMIT)
    os.kill(process, signal.SIGCONT)
    process = host.rendezvous()
    os.kill(process, signal.SIGSTOP)
    (tmp_path / "go").touch()
    duties.wait_for(lambda: host.said("workers are SUCCEEDED"), LIMIT)
    os.kill(process, signal.SIGKILL)

    results = [host.results(), other.results()]

    assert ['{"0": "result I of rank 0"}', '{"1": "result I of rank 1"}'] == results
