"""The three ways to start a job: the command line, torch's own command line, and a call from Python."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
LIMIT = 120.0
"""Seconds that any single command may take."""

Seen = dict[str, Any]
"""Facts and results that one worker reports."""
Start = Callable[..., list[Seen]]


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where one of *modules* is not installed; looks without importing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    return {**inherited, "PYTHONPATH": str(ROOT)}


def run(launcher: str, *args: str, folder: Path, status: int = 0) -> str:
    """Run a command line from *folder*, that must end with *status*; give its stderr."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", launcher, *args]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert status == done.returncode, done.stdout + done.stderr
    return done.stderr


def script(job: str, *args: object) -> list[str]:
    """The command line of the job *job*."""
    return [str(JOBS / f"{job}.py"), *map(str, args)]


def reports(folder: Path) -> list[Seen]:
    """Return the workers' reports in *folder*, by rank, and delete the files."""
    found = []
    for file in folder.glob("rank*.json"):
        found.append(json.loads(file.read_text()))
        file.unlink()
    return sorted(found, key=lambda seen: int(seen["rank"]))


def with_elasticrun(
    job: str, folder: Path, *args: int, workers: int = 2, restarts: int = 0, preload: Sequence[str] = ("torch",)
) -> list[Seen]:
    """``elasticrun --nproc-per-node 2 job.py``"""
    options = [f"--nproc-per-node={workers}", f"--max-restarts={restarts}", f"--preload={','.join(preload)}"]
    run("elasticlib.run", *options, *script(job, folder, *args), folder=folder)
    return reports(folder)


def with_torchrun(job: str, folder: Path, *args: int, workers: int = 2) -> list[Seen]:
    """``torchrun --standalone --nproc-per-node 2 job.py``"""
    options = ["--standalone", f"--nproc-per-node={workers}"]
    run("torch.distributed.run", *options, *script(job, folder, *args), folder=folder)
    return reports(folder)


def train(job: str, *args: Any) -> Seen:
    """Run the job in a worker: the frameworks are imported only there."""
    seen: Seen = importlib.import_module(f"tests.frameworks.jobs.{job}").train(*args)
    return seen


def with_elastic_launch(
    job: str, folder: Path, *args: int, workers: int = 2, restarts: int = 0, preload: Sequence[str] = ("torch",)
) -> list[Seen]:
    """``elastic_launch(LaunchConfig(nproc_per_node=2), train)(...)``"""
    folder.mkdir(exist_ok=True)
    config = LaunchConfig(nproc_per_node=workers, max_restarts=restarts, preload=tuple(preload))
    results = elastic_launch(config, train)(job, str(folder), *args)
    return [results[rank] for rank in sorted(results)]


both = pytest.mark.parametrize("start", [with_elastic_launch, with_elasticrun])
"""For tests of what must hold however the job was started."""
