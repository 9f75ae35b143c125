"""Workers on the CPUs of their GPUs, and alone with one device: the machine's tree is made up, the workers are real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, DefaultLogsSpecs, LaunchConfig, Std, elastic_launch
from elasticlib.numa import AffinityMode, NumaOptions
from elasticlib.numa._sysfs import read_topology
from elasticlib.processes import Caller
from elasticlib.workers import _devices, _plan
from elasticlib.workers._fork_servers import ForkServerKey
from tests.unit.numa.machines import Machine

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.6)]

METHODS = ["forkserver", "spawn", "fork"]
FACTS = (
    "import json, os, sys\n"
    "names = ('LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')\n"
    "facts = {name: os.environ.get(name) for name in names} | {'cpus': sorted(os.sched_getaffinity(0))}\n"
    "print(json.dumps(facts), *sys.argv[1:])\n"
)


def cpus() -> tuple[list[int], list[int]]:
    """Return the CPUs that this worker may use, and those that a thread of it may use."""
    import threading

    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return sorted(os.sched_getaffinity(0)), found[0]


@pytest.fixture
def node_of_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Two NUMA nodes of a CPU each, which this machine has; for each GPU the CPUs of its node."""
    allowed = sorted(os.sched_getaffinity(0))
    first, last = frozenset(allowed[:1]), frozenset(allowed[-1:])
    machine = Machine((first, last), (first | last,), (first, last), (first, last), gpus=(1, -1))
    machine.write(tmp_path / "machine")

    def addresses(fork_server: ForkServerKey | None, environment: Mapping[str, str], search_path: object) -> list[str]:
        return machine.addresses

    monkeypatch.setattr(_devices, "gpu_addresses", addresses)
    monkeypatch.setattr(_plan, "read_topology", lambda found: read_topology(found, str(tmp_path / "machine")))
    return [sorted(last), sorted(first)]


def options(**others: Any) -> dict[str, Any]:
    return {"nproc_per_node": 2, "numa_options": NumaOptions(AffinityMode.NODE), "preload": (), **others}


@pytest.mark.parametrize("method", METHODS)
def test_a_function_and_its_threads_run_on_the_cpus_of_its_gpu(method: str, node_of_gpu: list[list[int]]) -> None:
    results = elastic_launch(LaunchConfig(**options(start_method=method)), cpus)()

    assert {rank: (near, near) for rank, near in enumerate(node_of_gpu)} == results


@pytest.mark.parametrize(("method", "python"), [("forkserver", True), ("spawn", True), ("forkserver", False)])
def test_scripts_and_programs_run_on_the_cpus_of_their_gpu(
    method: str, python: bool, node_of_gpu: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.OUT)
    entry, args = (tmp_path / "facts.py", ()) if python else (sys.executable, (str(tmp_path / "facts.py"),))

    elastic_launch(LaunchConfig(**options(start_method=method, logs_specs=logs)), entry)(*args)

    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))]
    assert node_of_gpu == [facts["cpus"] for facts in reports]


def test_the_launcher_itself_is_not_bound(node_of_gpu: list[list[int]]) -> None:
    before = os.sched_getaffinity(0)

    elastic_launch(LaunchConfig(**options(start_method="fork")), cpus)()

    assert before == os.sched_getaffinity(0)


def test_gpus_are_queried_in_a_temporary_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real devices hidden there are none; the job's own fork server has been asked, and lives on."""
    monkeypatch.setattr(_devices._machine, "may_have_accelerators", lambda: True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    key = ForkServerKey(sys.executable, ("torch",))

    assert [] == _devices.gpu_addresses(key, environment, tuple(sys.path))
    assert [] == _devices.gpu_addresses(None, environment, ())
    [fork_server] = [each for each in _devices.fork_servers._kept if each.serves(key, environment, Caller.now())]
    assert fork_server.alive()


def test_a_virtual_local_rank_leaves_the_real_one_in_arguments_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    (tmp_path / "facts.py").write_text(FACTS)
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.OUT, tee=Std.OUT)
    config = LaunchConfig(nproc_per_node=2, virtual_local_rank=True, logs_specs=logs, preload=())

    elastic_launch(config, tmp_path / "facts.py")("${local_rank}")

    files = sorted(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
    reports = [path.read_text().rsplit(maxsplit=1) for path in files]
    assert ["0", "1"] == [path.parent.name for path in files]
    assert ["0", "1"] == [argument for _, argument in reports]
    assert [("0", "5"), ("0", "7")] == [
        (facts["LOCAL_RANK"], facts["CUDA_VISIBLE_DEVICES"]) for facts in (json.loads(text) for text, _ in reports)
    ]
    assert ["[default_role0]:", "[default_role1]:"] == sorted(
        line.split("{")[0] for line in capfd.readouterr().out.splitlines()
    )


def test_a_worker_that_cannot_be_bound_fails_and_runs_nowhere_else(
    node_of_gpu: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when its CPUs are taken from the launch between two rounds."""
    monkeypatch.setattr(_plan, "cpus_for", lambda *facts: frozenset({8191}))

    with pytest.raises(ChildFailedError):
        elastic_launch(LaunchConfig(**options(max_restarts=0)), (tmp_path / "ran").touch)()

    assert not (tmp_path / "ran").exists()


def threads_of_openmp() -> set[tuple[int, ...]]:
    """Return the sets of CPUs that this worker's threads may use after work that they shared."""
    import torch

    torch.set_num_threads(2)
    torch.rand(1_000_000).exp().sum()
    found = set()
    for thread in os.listdir("/proc/self/task"):
        found.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
    return found


def test_an_openmp_that_binds_its_threads_keeps_to_the_cpus_of_the_worker(
    node_of_gpu: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_PLACES", "threads")

    results = elastic_launch(LaunchConfig(**options(preload=("torch",))), threads_of_openmp)()

    assert {rank: {tuple(near)} for rank, near in enumerate(node_of_gpu)} == results
