"""Calls of `elastic_launch` from one machine on two others, through real SSH servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import tree
from tests.benchmarks.job import environment
from tests.hosts._netns import Host, machines, missing
from tests.hosts._sshd import Servers, missing_sshd, servers
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIMIT = 120.0
CLIENT = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ssh

class Point:
    def __init__(self, rank): self.rank = rank

def train(what, folder):
    rank = int(os.environ["RANK"])
    with open(f"{folder}/up.{rank}", "w") as file: file.write(str(os.getpid()))
    if what == "raise" and rank == 3: raise ValueError("bad batch")
    while what == "wait" and not os.path.exists(f"{folder}/go"): time.sleep(0.05)
    print(f"rank {rank} works")
    return Point(rank), os.uname().nodename, int(os.environ["WORLD_SIZE"])

if __name__ == "__main__":
    what, folder, hosts, options, timeout = json.loads(sys.argv[1])
    env = {each: os.environ[each] for each in os.environ if each.isupper() and each not in ("PWD", "SHLVL", "_")}
    engine = Ssh(hosts, env=env, options=options, timeout=timeout)
    began = time.monotonic()
    try:
        results = elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), train, on=engine)(what, folder)
    except Exception as error:
        classes = [each.__name__ for each in type(error).__mro__]
        print(json.dumps([classes, str(error).splitlines()[0], time.monotonic() - began]))
    else:
        print(json.dumps({rank: [value[0].rank, *value[1:]] for rank, value in results.items()}))
"""


class Cluster:
    """Two machines with SSH servers, and a third one for the client."""

    def __init__(self, hosts: tuple[Host, ...], ssh: Servers, folder: Path) -> None:
        self.hosts, self.ssh, self.folder = hosts, ssh, folder
        (folder / "client.py").write_text(CLIENT)

    def client(self, what: str, *names: str, key: str = "key", timeout: float = 20.0) -> subprocess.Popen[str]:
        """Start a client, whose hosts are *names*."""
        order = json.dumps([what, str(self.folder), names or ("m1", "m2"), self.ssh.options(key), timeout])
        return self.hosts[2].popen(
            [sys.executable, str(self.folder / "client.py"), order],
            cwd=self.folder,
            env=environment(self.folder, {"OMP_NUM_THREADS": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_workers(self, client: subprocess.Popen[str], count: int = 4) -> None:
        """Wait until *count* workers have begun."""
        ready = [self.folder / f"up.{rank}" for rank in range(count)]
        wait_until(lambda: client.poll() is not None or all(each.exists() for each in ready), LIMIT, "workers")
        assert client.poll() is None, client.communicate()

    def agent(self, number: int) -> int:
        """The pid of the agent on a machine: the parent of its helpers."""
        address = self.hosts[number].address
        of_machine = f" {address} 22"
        for pid in tree.marked(self.folder, tree.table()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            connection = next((each for each in variables if each.startswith("SSH_CONNECTION=")), "")
            if connection.endswith(of_machine) and " -m elasticlib.remote._node" in tree.command(pid):
                return pid
        raise AssertionError(f"no agent on {address}")

    def left(self, seconds: float) -> list[str]:
        """Command lines of processes of the job that are alive after *seconds*."""
        return sorted(tree.command(each.pid) for each in tree.left_after(seconds, (), self.folder))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if why := missing() or missing_sshd():
        pytest.skip(why)
    with machines(3) as hosts, servers(hosts[:2], tmp_path) as ssh:
        yield Cluster(hosts, ssh, tmp_path)


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
    assert message.startswith("rank 3: ValueError: bad batch (client.py:12)")
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
