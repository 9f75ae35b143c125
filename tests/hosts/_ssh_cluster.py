"""Machines with SSH servers, and clients whose calls run on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import tree
from tests.benchmarks.job import environment
from tests.hosts._netns import Host, machines, missing
from tests.hosts._sshd import Servers, missing_sshd, servers
from tests.waiting import wait_until

LIMIT = 120.0
CLIENT = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ssh

class Point:
    def __init__(self, rank): self.rank = rank

def train(what, folder):
    rank = int(os.environ["RANK"])
    with open(f"{folder}/new.{rank}", "w") as file: file.write(str(os.getpid()))
    os.replace(f"{folder}/new.{rank}", f"{folder}/up.{rank}")
    if what == "raise" and rank == 3: raise ValueError("bad batch")
    if what == "stop": breakpoint()
    while what == "wait" and not os.path.exists(f"{folder}/go"): time.sleep(0.05)
    print(f"rank {rank} works")
    return Point(rank), os.uname().nodename, int(os.environ["WORLD_SIZE"])

def connection(): return os.environ["SSH_CONNECTION"]

if __name__ == "__main__":
    what, folder, hosts, options, timeout = json.loads(sys.argv[1])
    env = {each: os.environ[each] for each in os.environ if each.isupper() and each not in ("PWD", "SHLVL", "_")}
    engine = Ssh(hosts, env=env, options=options, timeout=timeout)
    began = time.monotonic()
    if what == "twice":
        with engine:
            launch = elastic_launch(LaunchConfig(nproc_per_node=2), connection, on=engine)
            print(json.dumps([sorted(launch().values()) for _ in range(2)]))
            sys.exit()
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
        return self.start("client.py", what, str(self.folder), names or ("m1", "m2"), self.ssh.options(key), timeout)

    def start(self, program: str, *order: object) -> subprocess.Popen[str]:
        """Start a file of the folder on the client's machine; it gets *order* as JSON."""
        return self.hosts[2].popen(
            [sys.executable, str(self.folder / program), json.dumps(order)],
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


def missing_parts() -> str:
    """Why there can be no such machines here; empty when there can."""
    return missing() or missing_sshd()


@contextmanager
def ssh_cluster(folder: Path) -> Iterator[Cluster]:
    """Two machines with SSH servers, and a third one for clients."""
    with machines(3) as hosts, servers(hosts[:2], folder) as ssh:
        yield Cluster(hosts, ssh, folder)
