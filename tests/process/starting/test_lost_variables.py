"""Variables that torch's libraries read when they are loaded: set later, they have no effect."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib.preload._reads import LOST_AFTER_IMPORT, READ_WHEN_USED, is_lost_after_import

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "lost_variables.py"
LOST = {
    "OMP_SCHEDULE": "guided,7",
    "GOMP_CPU_AFFINITY": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_JIT": "0",
    "TORCH_LOGS": "+dynamo",
    "TORCH_LOGS_OUT": "{}/logs",
    "TORCH_TRACE": "{}/trace",
    "TORCH_DTRACE": "{}/dtrace",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TORCH_USE_RTLD_GLOBAL": "1",
    "TORCH_COMPILE_DEBUG": "1",
    "TORCHDYNAMO_VERBOSE": "1",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
}
OF_INTEL = "KMP_*"
"""Read by Intel's OpenMP, which some builds of torch have, and others get by LD_PRELOAD."""
SETS_KMP = """
import os, sys
name, value = "KMP_SETTINGS", "1"  # which prints what the library has read
if sys.argv[1] == "before":
    os.environ[name] = value
import torch
if sys.argv[1] == "after":
    os.environ[name] = value
torch.ones(1000, 1000).sum()
"""


def started(folder: Path, before: dict[str, str], after: dict[str, str]) -> subprocess.Popen[str]:
    """A program that prints what torch made of variables which are set *before* and *after* its import."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **before}
    command = [sys.executable, str(SCRIPT), json.dumps(after)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a backend for torch."""
    (tmp_path / "test_backend.py").write_text("def load(): pass\n")
    (tmp_path / "test_backend-1.dist-info").mkdir()
    text = "[torch.backends]\ntest_backend = test_backend:load\n"
    (tmp_path / "test_backend-1.dist-info" / "entry_points.txt").write_text(text)
    return tmp_path


@pytest.mark.sampled(0.05)
def test_a_variable_of_the_list_has_no_effect_after_the_import(folder: Path) -> None:
    values = {name: value.format(folder) for name, value in LOST.items()}
    values["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    programs = [started(folder, *given) for given in (({}, {}), (values, {}), ({}, values))]
    never, before, after = (json.loads(program.communicate()[0]) for program in programs)

    assert [] == [name for name in LOST if before[name] == never[name]], "no effect at all"
    assert [] == [name for name in LOST if after[name] != never[name]], "an effect after the import"
    assert {"TORCHINDUCTOR_CACHE_DIR"} == READ_WHEN_USED == {name for name in after if after[name] != never[name]}


def intels_openmp() -> str | None:
    """Its library, where the package is installed."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(Path(each.locate()).resolve()) for each in files if each.name == "libiomp5.so"), None)


@pytest.mark.skipif(intels_openmp() is None, reason="Intel's OpenMP is not here: pip install intel-openmp")
def test_variables_of_intels_openmp_have_no_effect_after_the_import() -> None:
    environment = {**os.environ, "LD_PRELOAD": str(intels_openmp()), "OMP_NUM_THREADS": "2"}

    def printed(when: str) -> str:
        command = [sys.executable, "-c", SETS_KMP, when]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    assert [True, False] == ["KMP_BLOCKTIME" in printed(when) for when in ("before", "after")]


def test_each_entry_of_the_list_is_tried() -> None:
    tried = {each for each in LOST_AFTER_IMPORT if any(fnmatch.fnmatchcase(name, each) for name in LOST)}

    assert {*LOST_AFTER_IMPORT} == tried | {OF_INTEL}
    assert not any(map(is_lost_after_import, ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR")))
