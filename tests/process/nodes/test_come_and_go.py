"""A node that its scheduler starts again and again, though it cannot work: the others work on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.rendezvous.coordinator._places import PAUSES
from tests.process.launches import WORK, Launch, free_port, run_python

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "full_node.py"
HEARTBEAT = 1.0
MOST = len(PAUSES) + 1
"""Exits that cost a node its place."""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def healthy(port: int) -> Iterator[Launch]:
    """A node at work, in a job that has room for another one."""
    launch = Launch(port, "job", heartbeat_timeout=HEARTBEAT)
    yield launch.at_work()
    launch.close()


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A folder on a file system without room."""
    (small_disk / "logs").mkdir()
    with open(small_disk / "much", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return small_disk / "logs"


@pytest.mark.sampled(0.05)
def test_node_that_keeps_leaving_is_refused_and_the_others_continue(port: int, healthy: Launch) -> None:
    ends = []
    for _ in range(MOST + 2):
        node = run_python(str(SCRIPT), f"127.0.0.1:{port}", str(HEARTBEAT), WORK)
        assert 1 == node.returncode
        ends.append(node.stderr)

    healthy.finish()
    status, output = healthy.ends()
    refused = [f"joined and left {MOST} times, each time after less than" in end for end in ends]
    assert [False] * MOST + [True] * 2 == refused, ends
    assert all("No space left on device" in end for end in ends)
    assert (0, True) == (status, output.count("at work") <= 2 * MOST + 1), output


@pytest.mark.sampled(0.6)
def test_a_node_that_cannot_write_its_logs_disturbs_no_round(port: int, healthy: Launch, full_disk: Path) -> None:
    node = Launch(port, "job", ["--log-dir", str(full_disk), "--redirects", "3"], heartbeat_timeout=HEARTBEAT)
    status, why = node.ends()
    node.close()

    healthy.finish()
    assert (2, True) == (status, "No space left on device" in why), why
    assert (0, 1) == (healthy.ends()[0], healthy.log.count("at work")), healthy.log
    assert [] == list(full_disk.iterdir())
