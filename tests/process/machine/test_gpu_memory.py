"""Restarts wait for the GPU memory of the workers that ended; the driver is a shim, all else is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch
from elasticlib.agent import _gpu_memory
from elasticlib.agent._gpu_memory import TOLERANCE
from tests.process.launches import ROOT, environment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SHIM = str(ROOT / "tests" / "shims" / "nvml")
LIMIT = 60.0
USED = 4 * TOLERANCE
RESTARTING = """
import sys
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.agent import _gpu_memory
from tests.process.machine.test_gpu_memory import fails_with_memory
_gpu_memory.DRIVER = "/dev/null"
if __name__ == "__main__":
    elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=3, preload=""), fails_with_memory)(Path(sys.argv[1]), 0)
"""


def note(folder: Path, line: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(f"{line}\n")


def lines(folder: Path) -> list[str]:
    """Return the log of driver queries and worker starts, in order."""
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


def uses(folder: Path, used: Any) -> None:
    fresh = folder / "fresh"
    fresh.write_text(json.dumps([["GPU-a", used]]))
    fresh.replace(folder / "gpus")


def fails_with_memory(folder: Path, readings: int) -> None:
    """Fail in the first round, with a driver that frees the memory by that of the *readings*; by none of them for 0."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    note(folder, f"worker {attempt}")
    if attempt == "0":
        uses(folder, [0, *[USED] * (readings - 1), 0] if readings else [0, USED])
        raise RuntimeError("out of luck")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(_gpu_memory, "DRIVER", str(driver))
    monkeypatch.syspath_prepend(SHIM)
    monkeypatch.setenv("NVML_STATE", str(tmp_path / "gpus"))
    monkeypatch.setenv("NVML_LOG", str(tmp_path / "log"))
    uses(tmp_path, 0)
    return tmp_path


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_next_round_starts_when_the_driver_has_freed_the_memory(method: Any, folder: Path) -> None:
    config = LaunchConfig(nproc_per_node=1, max_restarts=1, start_method=method, preload="", monitor_interval=0.01)

    elastic_launch(config, fails_with_memory)(folder, 4)

    # The first reading, of before the job, may come after its first worker has begun.
    done = lines(folder)
    assert ["read", "worker 0"] == sorted(done[:2])
    assert ["read", "read", "read", "read", "worker 1"] == done[2:]


def test_a_signal_during_the_wait_ends_the_launch_at_once(folder: Path) -> None:
    variables = environment(PYTHONPATH=f"{ROOT}:{SHIM}", ELASTICLIB_GPU_MEMORY_TIMEOUT="1000")
    script = folder / "script.py"
    script.write_text(RESTARTING)
    with subprocess.Popen([sys.executable, str(script), str(folder)], env=variables, stderr=subprocess.DEVNULL) as job:
        try:
            wait_until(lambda: lines(folder).count("read") > 2)
            job.send_signal(signal.SIGINT)
            job.wait(LIMIT)
        finally:
            job.kill()

    assert job.returncode not in (0, -signal.SIGKILL)
    assert "worker 1" not in lines(folder)
