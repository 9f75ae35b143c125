"""
Promise 23: a job of four nodes of a real Slurm, from sbatch to the last rank's first step.

Each launcher starts by the batch script of its own users.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from attrs import frozen

from tests.benchmarks import journal
from tests.benchmarks.figures import Benchmark, Figure, Goal, Of, Turn
from tests.benchmarks.job import JOBS, ROOT, BenchmarkError, new_folder
from tests.benchmarks.launchers import Launcher
from tests.slurm._cluster import Job, cluster, missing
from tests.waiting import wait_until

NODES = 4
LIMIT = 120.0
"""Seconds after which a job counts as hung."""


@frozen
class SlurmStart:
    """Seconds from the call of sbatch to the last rank's marks."""

    started: float
    """Its program runs."""
    imported: float
    """It has imported torch."""
    stepped: float
    """It has made its first step with all others."""


def measure(launcher: Launcher, turn: Turn) -> SlurmStart:
    """Submit a job once, on a cluster of its own. Raises `BenchmarkError` when it does not end well."""
    if why := missing():
        raise BenchmarkError(why)
    with cluster(NODES) as slurm, new_folder() as folder:
        shutil.copy(JOBS / "slurm_step.py", folder / "train.py")
        script = folder / "job.sh"
        script.write_text(launcher.batch_script)

        began = time.monotonic()
        job = slurm.submit(script, _exported(launcher, folder))
        _await_steps(job, folder)

        marks = journal.read(folder)
        last = {what: max(journal.select(marks, what).values()) - began for what in ("started", "imported", "stepped")}
        return SlurmStart(**last)


def _exported(launcher: Launcher, folder: Path) -> str:
    """Return the option of sbatch for the variables of the job: it finds its journal, and the launcher's commands."""
    path = f"{Path(launcher.python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return f"--export=ALL,{journal.FOLDER}={folder},PYTHONPATH={ROOT},PATH={path}"


def _await_steps(job: Job, folder: Path) -> None:
    # By its journal, as each question to Slurm is a process that takes time from the job.
    try:
        wait_until(lambda: len(journal.select(journal.read(folder), "stepped")) == NODES, LIMIT, lambda: job.said)
    except AssertionError as error:
        raise BenchmarkError(str(error)) from error
    if (state := job.ends()) != "COMPLETED":
        raise BenchmarkError(f"the job's state is {state}:\n{job.said}")


SLURM_START = Benchmark(
    "start of 4 nodes of Slurm",
    measure,
    (
        Figure(
            23,
            "Slurm, 4 nodes: sbatch to last rank's first step (no option; five)",
            "s",
            "stepped",
            (Goal(0.4, Of.RATIO),),
        ),
        Figure(23, "the same, to the last worker's first line", "s", "started"),
        Figure(23, "the same, to the last worker past `import torch`", "s", "imported"),
    ),
)
