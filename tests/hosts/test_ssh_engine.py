"""Calls of `elastic_launch` from one machine on two others, through real SSH servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import tree
from tests.hosts._ssh_cluster import LIMIT, Cluster, missing_parts, ssh_cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if why := missing_parts():
        pytest.skip(why)
    with ssh_cluster(tmp_path) as made:
        yield made


def outcome(client: subprocess.Popen[str]) -> tuple[str, str]:
    """The last line of a client that has ended, and all of its output."""
    stdout, stderr = client.communicate(timeout=LIMIT)
    lines = stdout.splitlines()
    assert lines, stderr
    return lines[-1], stdout + stderr


def test_one_call_returns_the_results_of_all_machines(cluster: Cluster) -> None:
    last, text = outcome(cluster.client("work"))

    assert {"0": [0, "m1", 4], "1": [1, "m1", 4], "2": [2, "m2", 4], "3": [3, "m2", 4]} == json.loads(last), text
    assert [f"[{rank}] rank {rank} works" for rank in range(4)] == sorted(
        line for line in text.splitlines() if "works" in line
    )
    assert [] == cluster.left(5.0)


def test_exception_of_a_remote_worker_is_raised_in_the_client(cluster: Cluster) -> None:
    last, text = outcome(cluster.client("raise"))
    classes, message, _ = json.loads(last)

    assert {"ChildFailedError", "ValueError"} <= set(classes), text
    assert message.startswith("rank 3: ValueError: bad batch (client.py:13)")
    assert [] == cluster.left(5.0)


def test_function_that_would_open_a_debugger_raises_at_its_line(cluster: Cluster) -> None:
    last, text = outcome(cluster.client("stop"))
    classes, message, _ = json.loads(last)

    assert "RuntimeError" in classes, text
    assert "breakpoint() cannot stop here: a rank on another machine cannot read your input" in message
    assert [] == cluster.left(5.0)


@pytest.mark.parametrize("host", [1, 0], ids=["other", "coordinator"])
def test_agent_that_is_killed_is_replaced(cluster: Cluster, host: int) -> None:
    client = cluster.client("wait")
    cluster.wait_for_workers(client)
    first = [cluster.folder / f"up.{rank}" for rank in range(4)]
    before = [path.read_text() for path in first]

    os.kill(cluster.agent(host), signal.SIGKILL)
    wait_until(lambda: all(path.read_text() not in ("", *before) for path in first), LIMIT, "new workers")
    (cluster.folder / "go").touch()
    last, text = outcome(client)

    assert {"0": 4, "1": 4, "2": 4, "3": 4} == {rank: value[2] for rank, value in json.loads(last).items()}, text
    assert [] == cluster.left(5.0)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=lambda signum: signum.name)
def test_nothing_is_left_when_the_client_is_ended(cluster: Cluster, signum: signal.Signals) -> None:
    client = cluster.client("wait")
    cluster.wait_for_workers(client)

    client.send_signal(signum)
    client.communicate(timeout=LIMIT)

    assert [] == cluster.left(5.0)


def test_machine_behind_a_cut_link_stops_its_workers(cluster: Cluster) -> None:
    client = cluster.client("wait", timeout=4.0)
    cluster.wait_for_workers(client)
    pids = [int((cluster.folder / f"up.{rank}").read_text()) for rank in (2, 3)]

    cluster.hosts[1].cut()

    wait_until(lambda: not any(tree.command(pid) for pid in pids), 30.0, "the end of the workers behind the cut link")
    cluster.hosts[1].heal()
    client.kill()
    client.communicate(timeout=LIMIT)
    assert [] == cluster.left(10.0)


@pytest.mark.parametrize(
    ("names", "key", "host", "message"),
    [
        (("m1",), "stranger", "m1", "Permission denied"),
        (("m1", "m9"), "key", "m9", "Could not resolve hostname"),
        (("m1", "m2:2222"), "key", "m2:2222", "Connection refused"),
    ],
    ids=["wrong key", "unknown host", "refused"],
)
def test_host_that_refuses_is_one_clear_error(
    cluster: Cluster, names: tuple[str, ...], key: str, host: str, message: str
) -> None:
    last, text = outcome(cluster.client("work", *names, key=key))
    classes, error, seconds = json.loads(last)

    assert "StartError" in classes, text
    assert error.startswith(f"host {host}: ")
    assert message in error
    print(f"{message}: {seconds:.2f} s: {error}")
    assert [] == cluster.left(5.0)


def test_host_that_is_down_is_one_clear_error(cluster: Cluster) -> None:
    cluster.hosts[1].cut()
    began = time.monotonic()

    last, text = outcome(cluster.client("work"))
    classes, error, seconds = json.loads(last)

    assert "StartError" in classes, text
    assert error.startswith("host m2: ssh: connect to host m2 port 22: ")
    print(f"host down: {seconds:.2f} s, with Python's start {time.monotonic() - began:.2f} s: {error}")
    assert [] == cluster.left(5.0)


def test_with_block_keeps_the_connections(cluster: Cluster) -> None:
    last, everything = outcome(cluster.client("twice"))

    first, second = json.loads(last)
    assert (4, first) == (len(first), second), everything
    assert 2 == len({*first})
    assert [] == cluster.left(5.0)
