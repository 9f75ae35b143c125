"""Suites on torch's own multi-process classes run unchanged, with processes from a fork server that stays warm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticlib.utils.process_state import read_proc_state
from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

CONFTEST = """
from elasticlib.testing import warm_torch_cases

warm_torch_cases("of_the_suite")
"""
HELPER = """
import os

print("imported of_the_suite")
PROCESS = os.getpid()
"""
SUITE = """
import os, signal, sys, unittest
import torch
import torch.distributed as dist
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import (
    DistributedTestBase, MultiProcContinuousTest, MultiProcessTestCase, skip_if_lt_x_gpu
)
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
import of_the_suite

class TestSums(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        os.environ["SET_UP"] = self._testMethodName
        self.special_return_code_checks = {getattr(self.test_killed, "__wrapped__", None): -signal.SIGABRT}
        self._spawn_processes()

    def begin(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_sum(self):
        self.assertEqual(os.environ["SET_UP"], "test_sum")
        self.begin()
        total = torch.ones(2)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 4.0))

    def test_the_fork_server_has_imported(self):
        self.assertEqual(of_the_suite.PROCESS, os.getppid())

    def test_fails_on_one(self):
        self.assertNotEqual(self.rank, 1)

    def test_killed(self):
        os.kill(os.getpid(), signal.SIGABRT)

    def test_others_go_on_after_one_was_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.ones(1)

    def test_leaves_something(self):
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.nn.Linear.forward = None

    def test_nothing_is_left(self):
        self.assertNotIn("LEFT", os.environ)
        self.assertEqual(torch.get_default_dtype(), torch.float32)

    @skip_if_lt_x_gpu(8)
    def test_needs_gpus(self):
        raise AssertionError

    def test_skips(self):
        raise unittest.SkipTest("not today")

    def test_prints(self):
        print(f"printed by rank {self.rank}", flush=True)
        self.assertNotEqual(self.rank, 0)

class TestDevices(DistributedTestBase):
    def test_sum(self, device):
        self.create_pg(device, world_size=self.world_size)
        total = torch.ones(2, device=device)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 4.0))

instantiate_device_type_tests(TestDevices, globals(), only_for=("cpu",))

class TestMesh(DTensorTestBase):
    world_size = 2

    @property
    def backend(self):
        return "gloo"

    @with_comms
    def test_mesh(self):
        mesh = self.build_device_mesh()
        self.assertEqual(mesh.size(), 2)

class TestFSDP(FSDPTest):
    world_size = 2

    def test_group(self):
        self.assertEqual(dist.get_world_size(), 2)

class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_one(self):
        total = torch.ones(2)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 2.0))
        type(self).mine = os.getpid()

    def test_two(self):
        self.assertEqual(type(self).mine, os.getpid())
        self.assertEqual(of_the_suite.PROCESS, os.getppid())
"""


def test_torchs_classes_run_unchanged_on_warm_processes(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.syspathinsert()

    result = run(SUITE, "-v", "-rfEs", "-p", "no:randomly", of_the_suite=HELPER)

    result.assert_outcomes(passed=10, failed=2, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*::TestSums::test_fails_on_one FAILED*",
            "*Process 1 exited with error code 10 and exception:*",
            "printed by rank 0",
        ],
        consecutive=False,
    )


def test_a_class_that_keeps_its_processes_may_be_the_first(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.syspathinsert()

    result = run(SUITE, "-k", "TestContinuous", of_the_suite=HELPER)

    result.assert_outcomes(passed=2, deselected=13)
    assert result.stdout.str().count("imported of_the_suite") <= 1


SPAWNED = """
import gc, multiprocessing, os, signal
import pytest, torch
import torch.distributed.launcher as launcher
import torch.multiprocessing as mp
import of_the_suite

def report(rank, queue):
    assert gc.isenabled() and gc.get_freeze_count()
    queue.put((rank, os.getppid(), os.environ["SET_UP"], torch.get_num_threads()))

def fail(rank):
    if rank == 1:
        raise ValueError("on rank 1")
    signal.pause()

def die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    signal.pause()

def add(value):
    assert os.getppid() == of_the_suite.PROCESS
    return int(os.environ["RANK"]) + value

def test_spawn(monkeypatch):
    monkeypatch.setenv("SET_UP", "by the test")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    queue = mp.get_context("spawn").SimpleQueue()

    assert mp.spawn(report, (queue,), nprocs=2) is None

    received = sorted(queue.get() for _ in range(2))
    parent = received[0][1]
    assert received == [(rank, parent, "by the test", 1) for rank in range(2)]
    assert parent != os.getpid()
    assert multiprocessing.get_start_method() != "spawn"

def test_an_exception():
    with pytest.raises(mp.ProcessRaisedException, match="on rank 1"):
        mp.spawn(fail, nprocs=2)

def test_a_signal():
    with pytest.raises(mp.ProcessExitedException, match="SIGABRT"):
        mp.start_processes(die, nprocs=2, start_method="spawn")

def test_the_launcher():
    config = launcher.LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        monitor_interval=0.1,
    )
    assert launcher.elastic_launch(config, add)(3) == {0: 3, 1: 4}

def test_another_start_method_is_left_alone():
    context = mp.start_processes(os.getpgid, nprocs=1, start_method="fork", join=False)
    assert not isinstance(context.processes[0], multiprocessing.get_context("forkserver").Process)
    context.join()
"""


def test_processes_of_torchs_spawn_and_launcher_are_warm(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.syspathinsert()

    result = run(SPAWNED, "-p", "no:randomly", of_the_suite=HELPER)

    result.assert_outcomes(passed=5)


HANGS = """
import os, time
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestHangs(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_hangs(self):
        with open(f"new-{self.rank}", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"new-{self.rank}", f"rank-{self.rank}")
        time.sleep(1000)
"""


def test_no_rank_outlives_pytest_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(HANGS)
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "pytest", "-q"]
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    until = time.monotonic() + 90

    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables}, stdout=subprocess.DEVNULL) as process:
        while not all(file.exists() for file in files) and time.monotonic() < until:
            time.sleep(0.02)
        process.kill()
    ranks = [int(file.read_text()) for file in files]

    while (states := [read_proc_state(rank) for rank in ranks]) and time.monotonic() < until:
        if all(state in (None, "Z", "X") for state in states):
            return
        time.sleep(0.02)
    pytest.fail(f"ranks {ranks} are in the states {states}")
