"""
Ends of a call on two hosts over SSH, beside torchrunx: processes that a killed client or a cut link leaves.

``python -m tests.benchmarks.ssh_ends``, as root, in an environment with torchrunx (``pip install torchrunx==0.4.0``)
and OpenSSH's server. Both call the same function with two workers on each host.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests.benchmarks import tree
from tests.hosts._ssh_cluster import LIMIT, Cluster, missing_parts, ssh_cluster
from tests.waiting import wait_until

PAUSE = 5.0
"""Seconds after which nothing may be left."""
LEASE = 4.0
"""Seconds without contact after which our hosts stop; torchrunx has no such setting."""
PEER = """
import json, os, sys, time
import torchrunx

def train(what, folder):
    rank = int(os.environ["RANK"])
    with open(f"{folder}/new.{rank}", "w") as file: file.write(str(os.getpid()))
    os.replace(f"{folder}/new.{rank}", f"{folder}/up.{rank}")
    while what == "wait" and not os.path.exists(f"{folder}/go"): time.sleep(0.05)
    return rank

if __name__ == "__main__":
    what, folder, hosts, config = json.loads(sys.argv[1])
    launcher = torchrunx.Launcher(
        hostnames=hosts, workers_per_host=2, ssh_config_file=config, backend=None, agent_timeout=30,
        copy_env_vars=("*",),
    )
    began = time.monotonic()
    try:
        launcher.run(train, what, folder)
    except BaseException as error:
        print(json.dumps([type(error).__name__, str(error)[:200], time.monotonic() - began]))
"""


def client(launcher: str, found: Cluster, what: str, *, key: str = "key") -> subprocess.Popen[str]:
    """Start a client whose workers wait, or only work."""
    if launcher == "elasticlib":
        return found.client(what, key=key, timeout=LEASE)

    config = found.folder / f"config.{key}"
    config.write_text(
        f"Host *\n  User root\n  IdentityFile {found.folder}/{key}\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    )
    (found.folder / "peer.py").write_text(PEER)
    return found.start("peer.py", what, str(found.folder), ["m1", "m2"], str(config))


def left(folder: Path) -> int:
    """Return the number of processes of the job on all machines."""
    return len(tree.marked(folder, tree.table()))


def killed_client(launcher: str, found: Cluster) -> str:
    """Kill the client, and count what is left."""
    with_workers(launcher, found).kill()
    time.sleep(PAUSE)
    return f"{left(found.folder)} processes left after {PAUSE:g} s"


def cut_link(launcher: str, found: Cluster) -> str:
    """Cut the link to one host, and wait for the end of its workers."""
    with_workers(launcher, found)
    pids = [int((found.folder / f"up.{rank}").read_text()) for rank in (2, 3)]
    began = time.monotonic()
    found.hosts[1].cut()
    while any(tree.command(pid) for pid in pids):
        if time.monotonic() - began > 60.0:
            return "workers of that host run after 60 s"
        time.sleep(0.05)
    return f"workers of that host end after {time.monotonic() - began:.1f} s"


def wrong_key(launcher: str, found: Cluster) -> str:
    """Call with a key that no host accepts."""
    return error_of(client(launcher, found, "work", key="stranger"))


def host_down(launcher: str, found: Cluster) -> str:
    """Call while a host cannot be reached."""
    found.hosts[1].cut()
    return error_of(client(launcher, found, "work"))


def with_workers(launcher: str, found: Cluster) -> subprocess.Popen[str]:
    """Return a client whose four workers have begun."""
    made = client(launcher, found, "wait")
    ready = [found.folder / f"up.{rank}" for rank in range(4)]
    wait_until(lambda: made.poll() is not None or all(each.exists() for each in ready), LIMIT, "workers")
    if made.poll() is not None:
        raise SystemExit(f"{launcher} has ended:\n{made.communicate()[0]}")
    return made


def error_of(client: subprocess.Popen[str]) -> str:
    """Return the time and the kind of the error that ends *client*."""
    try:
        output, _ = client.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"no error within {LIMIT:g} s"
    kinds, message, seconds = json.loads(output.splitlines()[-1])
    kind = kinds if isinstance(kinds, str) else kinds[0]
    return f"{kind} after {seconds:.1f} s: {message.splitlines()[0][:90] if message else ''}"


def main() -> None:
    """Print one line for each end and launcher."""
    if why := missing_parts():
        raise SystemExit(why)
    print(f"torchrunx {importlib.metadata.version('torchrunx')}, {os.cpu_count()} CPUs, {time.strftime('%F')}")
    for end in (killed_client, cut_link, wrong_key, host_down):
        for launcher in ("elasticlib", "torchrunx"):
            with tempfile.TemporaryDirectory(prefix="eb-") as path, ssh_cluster(Path(path)) as found:
                try:
                    print(f"{end.__name__}: {launcher}: {end(launcher, found)}", flush=True)
                finally:
                    for pid in tree.marked(Path(path), tree.table()):
                        os.kill(pid, 9)


if __name__ == "__main__":
    main()
