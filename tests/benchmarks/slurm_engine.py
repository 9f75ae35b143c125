"""
Calls on two nodes of a real Slurm beside submitit: from the call to the first step, and to the results of all ranks.

``python -m tests.benchmarks.slurm_engine [--pairs 3]``, as root, in an environment with submitit (``pip install
submitit==1.5.4``) and Slurm (``tests.slurm``). One function imports torch and makes a gloo group, the other one imports
nothing. Both launchers take turns on one cluster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.job import LIMIT, environment
from tests.slurm._cluster import Cluster, cluster, missing
from tests.waiting import wait_until

NODES = 2
STEPS = {
    "plain": "def step():\n    return time.time()\n",
    "torch": """\
def step():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    return time.time()
""",
}
LAUNCHES = {
    "elasticlib": """\
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Slurm

def call(function, folder):
    engine = Slurm(nodes=2, folder=folder)
    return list(elastic_launch(LaunchConfig(nproc_per_node=1), function, on=engine)().values())
""",
    "submitit": """\
import submitit

def call(function, folder):
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=5)
    return executor.submit(with_variables, function).results()

def with_variables(function):
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return function()
""",
}
MAIN = """\
if __name__ == "__main__":
    began = time.time()
    steps = call(step, sys.argv[1])
    print(json.dumps({"step": max(steps) - began, "results": time.time() - began}))
"""
"""To the last rank's step: a job waits for it."""


def measure(found: Cluster, launcher: str, kind: str) -> Mapping[str, float]:
    """Make one call of a new client, and return its seconds by what they lead to."""
    wait_until(lambda: set(found.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"}, LIMIT)
    with tempfile.TemporaryDirectory(prefix="eb-") as path:
        folder = Path(path)
        text = f"import json, sys, time\n{LAUNCHES[launcher]}\n{STEPS[kind]}\n{MAIN}"
        (folder / "client.py").write_text(text)
        client = found.head.popen(
            [sys.executable, str(folder / "client.py"), str(folder / "calls")],
            cwd=folder,
            env=environment(folder, {**found.environment(), "OMP_NUM_THREADS": "1", "HOME": path}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stdout, stderr = client.communicate(timeout=LIMIT)

    if client.returncode:
        raise SystemExit(f"{launcher} ended with {client.returncode}:\n{stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(stdout.splitlines()[-1])
    return seconds


def report(kind: str, ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> None:
    """Print the medians of both, and the median of the ratios of the pairs."""
    for what in ("step", "results"):
        own, peer = [each[what] for each in ours], [each[what] for each in theirs]
        ratio = statistics.median(a / b for a, b in zip(own, peer, strict=True))
        medians = f"{statistics.median(own):.2f} s, submitit {statistics.median(peer):.2f} s"
        print(f"{kind}: call to {what}: {medians}, ratio {ratio:.2f}", flush=True)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.slurm_engine", description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    pairs = parser.parse_args().pairs
    if why := missing():
        raise SystemExit(why)

    print(
        f"submitit {importlib.metadata.version('submitit')}, {os.cpu_count()} CPUs, {time.strftime('%F')}", flush=True
    )
    with cluster(NODES) as found:
        for kind in STEPS:
            seconds = {launcher: list[Mapping[str, float]]() for launcher in LAUNCHES}
            for _ in range(pairs):
                for launcher, values in seconds.items():
                    values.append(measure(found, launcher, kind))
            report(kind, *seconds.values())
            print(f"load of the machine: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
