"""
Calls on a Ray cluster of three nodes, beside Ray Train: to the first step, and from a loss to the next step.

``python -m tests.benchmarks.ray_recovery``, as root, in an environment with Ray Train (``pip install 'ray[train]'``).
Both run the same function on the same cluster, one after the other. A row has a limit of its own.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.process.launches import environment
from tests.ray._cluster import Cluster, cluster

LIMIT = 120.0
"""Seconds for each row."""
START_LIMIT = 240.0
"""Seconds for the start of a call: Ray Train takes long on a busy machine."""
MOMENTS = (0.0, 2.5)
"""Seconds from a group's first step to the death of a worker."""
STEPS = """
import os, time

def train(config):
    import torch.distributed as dist
    if not dist.is_initialized(): dist.init_process_group("gloo")
    folder, rank, world = config["folder"], dist.get_rank(), dist.get_world_size()
    while True:
        dist.barrier()
        with open(f"{folder}/new.{rank}", "w") as file: file.write(f"{os.getpid()} {world} {time.time()}")
        os.replace(f"{folder}/new.{rank}", f"{folder}/step.{rank}")
        if not config["runs"]: return
        time.sleep(0.05)

def call_all(folder, calls, runs, call):
    for _ in range(int(calls)):
        began = time.time()
        call({"folder": folder, "runs": runs == "runs"})
        print("call", began, time.time(), open(f"{folder}/step.0").read().split()[2], flush=True)
"""
OURS = """
import sys
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray
from steps import call_all, train

if __name__ == "__main__":
    with Ray(nodes=3) as cluster:
        call_all(*sys.argv[1:], elastic_launch(LaunchConfig(2, 3, max_restarts=9), train, on=cluster))
"""
PEER = """
import sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from steps import call_all, train

def call(config):
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(2, 3) if config["runs"] else 3,
            resources_per_worker={"CPU": 1},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(storage_path=config["folder"] + "/store", failure_config=FailureConfig(max_failures=9)),
    ).fit()

if __name__ == "__main__":
    ray.init(address="auto")
    call_all(*sys.argv[1:], call)
"""
PROGRAMS = {"elasticlib": OURS, "Ray Train": PEER}
Figures = Mapping[str, float]


class LateError(Exception):
    """A row has reached its limit."""


def _client(found: Cluster, folder: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "steps.py").write_text(STEPS)
    (folder / "client.py").write_text(program)
    variables = environment(RAY_ADDRESS=found.address, RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1")
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "client.py", str(folder), *arguments],
            cwd=folder,
            env={**variables, "PYTHONPATH": f"{folder}:{variables.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _group(folder: Path, world: int) -> set[int]:
    """Pids of the workers of a group of *world* that have done a step."""
    found = set()
    for path in (folder / f"step.{rank}" for rank in range(world)):
        pid, of, _ = path.read_text().split() if path.exists() else ("0", "0", "0")
        if of == str(world):
            found.add(int(pid))
    return found


def _wait(is_true: Callable[[], bool], limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not is_true():
        if time.monotonic() > deadline:
            raise LateError
        time.sleep(0.02)


def _seconds_to_group(folder: Path, worlds: tuple[int, ...], act: Callable[[], object]) -> float:
    """Seconds from *act* to the first common step of a new group of one of the *worlds*; infinite after the limit."""
    former = _group(folder, 2) | _group(folder, 3)
    began = time.time()
    act()
    try:
        _wait(lambda: any(len(_group(folder, world) - former) == world for world in worlds))
    except LateError:
        return math.inf
    return time.time() - began


def _calls(found: Cluster, folder: Path, program: str) -> Figures:
    """Seconds from the beginning of each of two calls to its first step."""
    client = _client(found, folder, program, "2", "once")
    try:
        stdout, _ = client.communicate(timeout=2 * START_LIMIT)
    except subprocess.TimeoutExpired:
        client.kill()
        stdout, _ = client.communicate()
    calls = [list(map(float, line.split()[1:])) for line in stdout.splitlines() if line.startswith("call ")]
    seconds = [stepped - began for began, _, stepped in calls] + [math.inf] * 2
    return {"first call to its first step (s)": seconds[0], "second call to its first step (s)": seconds[1]}


def _losses(found: Cluster, folder: Path, program: str) -> Figures:
    """Seconds from each loss to the next step, and the number of workers that outlive the driver."""
    client = _client(found, folder, program, "1", "runs")
    figures: dict[str, float] = {}
    try:
        _wait(lambda: len(_group(folder, 3)) == 3, START_LIMIT)
        for moment in MOMENTS:
            time.sleep(moment)
            victim = min(_group(folder, 3) or _group(folder, 2))
            # Ray Train may go on with two workers.
            figures[f"worker killed {moment:g} s after the first step, to the next step (s)"] = _seconds_to_group(
                folder,
                (2, 3),
                lambda victim=victim: os.kill(victim, signal.SIGKILL),  # type: ignore[misc]
            )
        for text, worlds, act in (
            ("node lost, to the next step of two nodes (s)", (2,), found.remove),
            ("node added, to the next step of three nodes (s)", (3,), found.add),
        ):
            figures[text] = _seconds_to_group(folder, worlds, lambda act=act: act("n2"))  # type: ignore[misc]
    except (LateError, ValueError, OSError) as error:
        print(f"the rest is not measured: {error!r}", flush=True)
    finally:
        workers = _group(folder, 3) | _group(folder, 2)
        client.kill()
        client.communicate()
    time.sleep(5.0)
    figures["workers left 5 s after the driver's death"] = sum(os.path.exists(f"/proc/{pid}") for pid in workers)
    return figures


def _table(figures: Mapping[str, Figures]) -> None:
    """Print a row for each figure: ours, the peer's, and the ratio."""
    ours, peers = (figures.get(name, {}) for name in PROGRAMS)
    for name, value in ours.items():
        peer = peers.get(name, math.nan)
        ratio = f"{value / peer:.2f}x" if peer and math.isfinite(value / peer) else "-"
        print(f"{name}: {value:.2f}, Ray Train {peer:.2f}, ratio {ratio}", flush=True)


def main() -> None:
    """Print all figures."""
    with cluster("n1", "n2", "n3") as found, tempfile.TemporaryDirectory(prefix="eb-") as folder:
        print(f"load of the machine: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} CPUs", flush=True)
        for act in (_calls, _losses):
            figures = {}
            for name, program in PROGRAMS.items():
                place = Path(folder, f"{act.__name__}-{name.replace(' ', '-')}")
                place.mkdir()
                figures[name] = act(found, place, program)
                print(f"{name}: {dict(figures[name])}", flush=True)
                if not figures[name] or math.inf in figures[name].values():
                    print((place / "errors").read_text()[-1500:], flush=True)
            _table(figures)
        print(f"load of the machine: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
