"""Jobs of one node on a machine that lacks an address or a name which others have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts._netns import missing

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

JOBS = """
import os, sys
import torch
import torch.distributed as dist
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.run import main

def total():
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.destroy_process_group()
    return f"{one.item():g} at {os.environ['MASTER_ADDR']}"

if __name__ == "__main__":
    if "RANK" in os.environ:
        os.write(1, f"script: {total()}\\n".encode())
    else:
        main(["--nproc-per-node", "2", __file__])
        print("function:", *elastic_launch(LaunchConfig(nproc_per_node=2), total)().values())
"""
FILES = {"hosts": "/etc/hosts", "resolver": "/etc/resolv.conf"}
IPV6_ALONE = "ip addr del 127.0.0.1/8 dev lo"
MACHINES = {"IPv6 alone": (IPV6_ALONE, "::1 m1\n", "::1"), "no name localhost": (":", "192.0.2.9 m2\n", "127.0.0.1")}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_job_of_one_node_needs_neither_ipv4_nor_a_name_for_loopback(machine: str, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    change, names, address = MACHINES[machine]
    (tmp_path / "hosts").write_text(names)
    (tmp_path / "resolver").write_text("nameserver 127.0.0.53\n")
    (tmp_path / "jobs.py").write_text(JOBS)
    files = [f"mount --bind {tmp_path}/{name} $(realpath {path})" for name, path in FILES.items()]
    shell = " && ".join(["hostname m1", "ip link set lo up", change, *files, f"exec {sys.executable} jobs.py"])

    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", shell],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert 0 == done.returncode, done.stderr
    each = f"2 at {address}"
    assert [f"function: {each} {each}", f"script: {each}", f"script: {each}"] == sorted(done.stdout.splitlines())
