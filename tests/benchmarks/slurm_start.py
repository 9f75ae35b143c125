"""
Promise 23: a job of four nodes of a real Slurm, from sbatch to the last rank's first step.

Each launcher starts by the batch script of its own users. Beside them srun starts the same program without a launcher:
a launcher that took no time would need as long, since each node imports torch once.
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
from tests.slurm._cluster import Cluster, Job, cluster, missing
from tests.waiting import wait_until

NODES = 4
LIMIT = 120.0
"""Seconds after which a job counts as hung."""
BARE_SCRIPT = f"""#!/bin/bash
#SBATCH --nodes={NODES} --ntasks-per-node=1
export MASTER_ADDR=$(hostname) MASTER_PORT=29411 WORLD_SIZE={NODES} TORCHELASTIC_RESTART_COUNT=0
srun sh -c 'RANK=$SLURM_PROCID exec python train.py'
"""
"""The program of each node is its only rank."""


@frozen
class SlurmStart:
    """Seconds from the call of sbatch to the last rank's marks."""

    started: float
    """Its program runs."""
    imported: float
    """It has imported torch."""
    stepped: float
    """It has made its first step with all others."""
    bare: float
    """The same as `stepped` for a program that srun starts itself."""


def measure(launcher: Launcher, turn: Turn) -> SlurmStart:
    """Submit a job once, on a cluster of its own. Raises `BenchmarkError` when it does not end well."""
    if why := missing():
        raise BenchmarkError(why)
    with cluster(NODES) as slurm:
        bare = _run(slurm, launcher, BARE_SCRIPT)
        return SlurmStart(**_run(slurm, launcher, launcher.batch_script), bare=bare["stepped"])


def _run(slurm: Cluster, launcher: Launcher, text: str) -> dict[str, float]:
    """Return the seconds from the submission of the script *text* to the last rank's marks."""
    with new_folder() as folder:
        shutil.copy(JOBS / "slurm_step.py", folder / "train.py")
        script = folder / "job.sh"
        script.write_text(text)

        began = time.monotonic()
        job = slurm.submit(script, _exported(launcher, folder))
        _await_steps(job, folder)

        marks = journal.read(folder)
        return {what: max(journal.select(marks, what).values()) - began for what in ("started", "imported", "stepped")}


def _exported(launcher: Launcher, folder: Path) -> str:
    """Return the option of sbatch for the variables of the job: it finds its journal, and the launcher's commands."""
    path = f"{Path(launcher.python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return f"--export=ALL,{journal.FOLDER}={folder},PYTHONPATH={ROOT},PATH={path}"


def _await_steps(job: Job, folder: Path) -> None:
    # By its journal, as each question to Slurm is a process that takes time from the job.
    try:
        wait_until(lambda: len(journal.select(journal.read(folder), "stepped")) == NODES, LIMIT, lambda: job.output)
    except AssertionError as error:
        raise BenchmarkError(str(error)) from error
    if (state := job.ends()) != "COMPLETED":
        raise BenchmarkError(f"the job's state is {state}:\n{job.output}")


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
        Figure(23, "the same, by srun without a launcher", "s", "bare", against="stepped"),
    ),
)
