"""Workers with a real accelerator: forked from the fork server, and yet each with a device context of its own."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, SpecError, elastic_launch, records

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
METHODS = ["forkserver", "spawn"]


@pytest.fixture
def work() -> Any:
    """Return the module of worker functions; a test loads it on demand because it imports torch."""
    return importlib.import_module("tests.gpu.work")


def launch(workers: int | str, duty: Any, *args: Any, **settings: Any) -> dict[int, Any]:
    """Results by rank of a launch without restarts."""
    config = LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, **settings})
    return elastic_launch(config, duty)(*args)


def in_a_new_program(code: str, **environment: str) -> Any:
    """Run *code* in a new program that has not used a device; return the JSON that it prints."""
    head = "import json, os\nfrom elasticlib import LaunchConfig, elastic_launch\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_begins_without_cuda_and_may_use_it(method: str, work: Any) -> None:
    assert {0: (False, False), 1: (False, False)} == launch(2, work.clean_start, start_method=method)


@pytest.mark.parametrize("method", METHODS)
def test_each_worker_draws_numbers_of_its_own_on_the_device(method: str, work: Any) -> None:
    """The device's generators are made after the fork: nobody chose their seed, and no two are alike."""
    drawn = [each for _ in range(2) for each in launch(2, work.drawn, "cuda", start_method=method).values()]

    assert 4 == len(set(drawn))


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_nccl_works_in_a_worker(method: str, work: Any) -> None:
    """One rank: NCCL takes no two on one device."""
    assert {0: 1.0} == launch(1, work.sum_over_ranks, "cuda", "nccl", start_method=method)


@pytest.mark.parametrize("method", METHODS)
def test_two_workers_share_one_device_through_gloo(method: str, work: Any) -> None:
    assert {0: 3.0, 1: 3.0} == launch(2, work.sum_over_ranks, "cuda:0", "gloo", start_method=method)


def test_a_model_compiles_for_the_device_in_a_forked_worker(work: Any) -> None:
    """Inductor and Triton: processes, a compiler and a launcher of their own."""
    assert launch(1, work.compiled_difference, "cuda")[0] < 1e-3


def test_memory_of_a_killed_worker_is_free_again(work: Any) -> None:
    free = launch(1, work.free_memory)[0]
    with pytest.raises(ChildFailedError, match="SIGKILL"):
        launch(1, work.killed_with_memory, "cuda", work.BLOCK)

    afterwards = launch(1, work.free_memory_reaches, free - work.BLOCK // 4)[0]

    assert afterwards >= free - work.BLOCK // 4


def test_a_restart_finds_a_device_that_works(work: Any) -> None:
    """A kill amid device work leaves nothing that the next round stumbles over."""
    results = launch(2, work.killed_once, "cuda:0", work.BLOCK, max_restarts=1)

    expected = {"round": "1", "sum": 4.0, "held": work.BLOCK}
    assert {0: expected, 1: expected} == results


def test_a_restart_waits_until_the_driver_has_freed_the_memory(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Both rounds take nine tenths of what is free: the second could not, if a part of it were not free again."""
    pytest.importorskip("pynvml")
    size = launch(1, work.free_memory)[0] * 9 // 10
    with caplog.at_level(logging.DEBUG, "elasticlib"):
        results = launch(1, work.killed_once_with_memory, "cuda", size, max_restarts=1)

    assert {0: "1"} == results
    assert 1 == sum(isinstance(each, records.GpuMemoryFree) for line in caplog.records for each in line.args or ())


def test_repeated_kills_leak_no_memory(work: Any) -> None:
    free = launch(1, work.free_memory)[0]
    for _ in range(5):
        with pytest.raises(ChildFailedError):
            launch(2, work.killed_with_memory, "cuda:0", work.BLOCK)

    assert launch(1, work.free_memory_reaches, free - work.BLOCK // 4)[0] >= free - work.BLOCK // 4


@pytest.mark.parametrize("method", METHODS)
def test_a_caller_that_uses_cuda_launches_workers_that_use_it(method: str) -> None:
    """The caller's context lives on beside those of the workers, over two launches."""
    printed = in_a_new_program(
        "import torch\nfrom tests.gpu import work\n"
        "mine = torch.ones(3, device='cuda')\n"
        f"config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method={method!r})\n"
        "results = [elastic_launch(config, work.sum_over_ranks)('cuda:0', 'gloo') for _ in range(2)]\n"
        "print(json.dumps([results, float(mine.sum())]))"
    )

    assert [[{"0": 3.0, "1": 3.0}] * 2, 3.0] == printed


def test_result_on_the_device_is_returned() -> None:
    printed = in_a_new_program(
        "from tests.gpu import work\n"
        "value = elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=0), work.tensor)('cuda')[0]\n"
        "print(json.dumps([value.device.type, value.tolist()]))"
    )

    assert ["cuda", [0, 1, 2]] == printed


COUNTS = (
    "def visible():\n    import torch\n    return torch.cuda.device_count()\n"
    "results = elastic_launch(LaunchConfig(nproc_per_node={nproc!r}, max_restarts=0), visible)()\n"
    "import sys\n"
    "opened = [os.readlink(f'/proc/self/fd/{{n}}') for n in os.listdir('/proc/self/fd') "
    "if os.path.lexists(f'/proc/self/fd/{{n}}')]\n"
    "print(json.dumps([len(results), results[0], [p for p in opened if 'nvidia' in p], 'torch' in sys.modules]))"
)


@pytest.mark.parametrize("nproc", ["gpu", "auto"])
def test_devices_are_counted_without_touching_one_in_the_caller(nproc: str) -> None:
    """One worker per device; the caller has neither opened a device nor loaded torch."""
    workers, devices, opened, loaded = in_a_new_program(COUNTS.format(nproc=nproc))

    assert workers == devices > 0
    assert ([], False) == (opened, loaded)


def test_devices_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with pytest.raises(SpecError, match="no accelerator at all"):
        launch("gpu", work.clean_start)

    assert len(os.sched_getaffinity(0)) == len(launch("auto", work.clean_start))
