"""Suites of unittest whose tests run on ranks: a sample in the style of torch's own, on both base classes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

ROOT = Path(__file__).resolve().parents[2]
STYLE = """
import os, sys, unittest
import torch
import torch.distributed as dist
{imports}

class TestSums({base}):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    def begin(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_all_reduce(self):
        self.begin()
        total = torch.full((3,), float(self.rank))
        dist.all_reduce(total)
        self.assertEqual(total, torch.ones(3))
        self.assertEqual(total[0], 1)
        self.assertNotEqual(total, torch.zeros(3))

    @skip_if_lt_x_gpu(8)
    def test_gpus(self):
        raise AssertionError("it has no GPUs")

    def test_fails_on_one(self):
        self.begin()
        self.assertEqual(torch.ones(2) * self.rank, torch.zeros(2))
        dist.barrier()
"""
"""A suite as those on torch's base class are written."""
OF_TORCH = "from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu"
OURS = """
# The decorator does what torch's does, without the seconds that the import of its module takes.
from elasticlib.testing import ElasticTestCase

def skip_if_lt_x_gpu(number):
    def decorated(function):
        def skipped(self):
            fake = sys.modules["torch.testing._internal.common_distributed"] = type(sys)("fake")
            skip = type("", (), {"exit_code": 85, "message": "Need at least 8 CUDA devices"})
            fake.TEST_SKIPS = {"multi-gpu-8": skip}
            sys.exit(85)
        return skipped
    return decorated
"""
MORE = """
    def test_name(self):
        self.assertTrue(self.id().endswith("TestSums.test_name"))
        self.assertEqual("test_name", self._current_test_name())
        self.assertIs(self.is_master, self.rank == 0)

    def test_subtests(self):
        for number in range(3):
            with self.subTest("even", number=number, by=[number]):
                self.assertEqual(0, number % 2)

    def test_skip(self):
        self.skipTest("not today")

    @unittest.skip("never")
    def test_never(self):
        raise AssertionError

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(1, 2)

class TestState(ElasticTestCase, group="fresh"):
    @classmethod
    def setUpClass(cls):
        cls.parent, cls.table = os.getpid(), {"a": 1}

    def setUp(self):
        self.mine = [self.rank]
        self.addCleanup(self.mine.clear)

    def tearDown(self):
        # Each rank's test has ended by now, so that nobody writes any more.
        assert os.path.exists(self.file_name + str(1 - self.rank))

    def test_it_runs_on_ranks_with_what_its_class_and_set_up_have_made(self):
        self.assertNotEqual(self.parent, os.getpid())
        self.assertEqual({"a": 1}, self.table)
        everyone = [None, None]
        dist.all_gather_object(everyone, self.mine)
        self.assertEqual([[0], [1]], everyone)
        if self.rank:
            import time; time.sleep(0.2)
        open(self.file_name + str(self.rank), "x").close()
        os.environ["LEFT"] = "by a test"
        os.chdir("/")

    def test_nothing_of_another_test_is_left(self):
        open(self.file_name + str(self.rank), "x").close()
        self.assertNotIn("LEFT", os.environ)
        self.assertNotEqual("/", os.getcwd())
        self.assertEqual(0, os.path.getsize(self.file_name))

class TestWaits(ElasticTestCase, timeout=3, group="fresh"):  # the last one, on workers that are warm
    def test_hang(self):
        if self.rank == 0:
            dist.barrier()

if __name__ == "__main__":
    unittest.main()
"""
OUTCOMES = {
    "test_all_reduce": "ok",
    "test_gpus": "skipped 'Need at least 8 CUDA devices'",
    "test_fails_on_one": "FAIL",
    "test_name": "ok",
    "test_skip": "skipped 'not today'",
    "test_never": "skipped 'never'",
    "test_expected": "expected failure",
    "test_it_runs_on_ranks_with_what_its_class_and_set_up_have_made": "ok",
    "test_nothing_of_another_test_is_left": "ok",
    "test_hang": "ERROR",
}


def unittest_of(code: str, folder: Path, *args: str) -> str:
    """Return the output of unittest for a suite, in a program that cannot import pytest."""
    (folder / "suite.py").write_text(code)
    (folder / "pytest.py").write_text("raise ImportError('there is no pytest')")
    (folder / "_pytest.py").write_text("raise ImportError('there is no pytest')")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    env.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return re.sub(r"\[W\d+ [^\n]*\n", "", done.stderr)  # torch's C++, where no name server answers


@pytest.mark.parametrize("args", [("-m", "unittest", "-v", "suite"), ("suite.py", "-v")], ids=["module", "script"])
def test_a_suite_in_torchs_style_runs_under_unittest_without_pytest(tmp_path: Path, args: tuple[str, ...]) -> None:
    shown = unittest_of(STYLE.format(imports=OURS, base="ElasticTestCase") + MORE, tmp_path, *args)

    found = dict(re.findall(r"^(test_\w+) \(.*?\) ?(?:\.\.\. )?(.*)$", shown, re.M))
    assert {name: how for name, how in OUTCOMES.items() if found.get(name) != how} == {}, shown
    assert "FAIL: test_subtests" in shown and "[even] (number=1, by=[1])" in shown
    assert "number=0" not in shown and "number=2" not in shown
    assert "RanksFailed: ranks 0-1, line" in shown
    assert re.search(r"RanksFailed: rank 1, line \d+: AssertionError: Tensor-likes are not close!", shown)
    assert "    self.assertEqual(torch.ones(2) * self.rank, torch.zeros(2))\nAssertionError" in shown
    assert re.search(
        r"timeout of 3 s: rank 0 at suite.py:\d+ in the collective barrier, rank 1 at "
        r"\(it has ended, and waits for the others\)",
        shown,
    )
    assert shown.rstrip().endswith("FAILED (failures=2, errors=1, skipped=3, expected failures=1)")


def test_a_suite_in_torchs_style_runs_under_pytest(run: Run) -> None:
    result = run(STYLE.format(imports=OURS, base="ElasticTestCase") + MORE, "-rA")

    result.assert_outcomes(passed=5, failed=3, skipped=3, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ rank 1 of 2 *",
            ">       self.assertEqual(torch.ones(2) * self.rank, torch.zeros(2))",
            "E       AssertionError: Tensor-likes are not close!",
            "rank 0: test_it.py:* in the collective barrier",
            "rank 1: (it has ended, and waits for the others)",
            "*FAILED *test_fails_on_one - rank 1, line *",
        ],
        consecutive=False,
    )


@pytest.mark.sampled(0.05)
def test_the_sample_has_the_same_outcomes_on_torchs_base_class(tmp_path: Path) -> None:
    """It takes half a minute, and more on a busy machine."""
    pytest.importorskip("expecttest")

    shown = unittest_of(
        STYLE.format(imports=OF_TORCH, base="MultiProcessTestCase"), tmp_path, "-m", "unittest", "suite"
    )

    assert "AssertionError: Tensor-likes are not close!" in shown
    assert shown.rstrip().endswith("FAILED (errors=1, skipped=1)")


WITH_TORCHS_HELPERS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase
from elasticlib.testing import ElasticTestCase

class TestIt(ElasticTestCase, TestCase, group="fresh"):
    def test_sum(self):
        total = torch.ones(2)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 2.0))

class TestDevices(ElasticTestCase, TestCase, group="fresh"):
    def test_sum(self, device):
        total = torch.ones(2, device=device)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 2.0))
        self.assertEqual(self.device_type, "cpu")

instantiate_device_type_tests(TestDevices, globals(), only_for=("cpu",))
"""


def test_a_case_on_torchs_test_case_has_its_helpers_and_device_types(run: Run) -> None:
    result = run(WITH_TORCHS_HELPERS, "-v")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::TestIt::test_sum PASSED*", "*::TestDevicesCPU::test_sum_cpu PASSED*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("timeout=0", "class It: timeout=0 must be a number of seconds above 0"),
        ("nproc=4", "class It: use world_size=4; nproc is only for the elastic marker"),
        ("threads=True", "class It: threads=True is unknown"),
        ("backend='glo'", "class It: backend='glo' is unknown"),
    ],
)
def test_an_option_that_cannot_be_is_refused_where_the_class_is_defined(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        exec(f"from elasticlib.testing import ElasticTestCase\nclass It(ElasticTestCase, {options}): pass")
