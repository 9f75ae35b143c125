"""
The two things that are measured, each as one value.

Rules of this file: all that the rooms know about a launcher is here; a room never asks for its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from attrs import evolve, field, frozen

from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from tests.slurm._page import script_of_page

_TORCHRUN_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=4 --nproc-per-node=1 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\
    --rdzv-endpoint="$head:29500" train.py
"""


@frozen
class Launcher:
    """Commands and settings that start workers with one library."""

    name: str
    command: tuple[str, ...]
    """The command line before its options."""
    interface: str
    """The module that holds `LaunchConfig` and `elastic_launch`."""
    package: str
    """Package that corresponds to ``torch.distributed.elastic``."""
    start_method: str
    """Default start method of `LaunchConfig`."""
    settings: Mapping[str, object] = field(factory=dict)
    """Fields that `LaunchConfig` needs for one node where the defaults do not do."""
    inner: tuple[str, ...] = ()
    """The processes between launcher and workers, outermost first."""
    nodes: str = ""
    """The module that plays many nodes of a c10d job in one process."""
    most_nodes: int | None = None
    """Largest number of nodes that form a round in acceptable time; None without a limit."""
    node_variables: Mapping[str, str] = field(factory=dict)
    """Environment variables of the process that runs a node's rendezvous."""
    rows: tuple[str, ...] = ()
    """Options under which it draws a row for each worker; empty where it cannot."""
    batch_script: str = ""
    """The script by which its users start ``train.py`` on four nodes of Slurm."""
    python: str = sys.executable
    """The interpreter of its programs."""

    def under(self, python: str) -> Launcher:
        """The same, of another interpreter, which may have another torch."""
        return evolve(self, python=python, command=(python, *self.command[1:]))


ELASTICLIB = Launcher(
    name="elasticlib",
    command=(sys.executable, "-m", "elasticlib.run"),
    interface="elasticlib",
    package="elasticlib.elastic",
    start_method="forkserver",
    inner=("reaper", "fork server", "spawner"),
    nodes="tests.benchmarks.jobs.our_nodes",
    rows=("--progress",),
    batch_script=script_of_page(),
    node_variables={"RES_OPTIONS": QUIET_LOOKUPS, "TORCH_CPP_LOG_LEVEL": "ERROR"},
)

TORCHRUN = Launcher(
    name="torchrun",
    command=(sys.executable, "-m", "torch.distributed.run"),
    interface="torch.distributed.launcher.api",
    package="torch.distributed.elastic",
    start_method="spawn",
    settings={"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "benchmark"},
    nodes="tests.benchmarks.jobs.torch_nodes",
    most_nodes=64,
    batch_script=_TORCHRUN_SCRIPT,
)

LAUNCHERS = {each.name: each for each in (ELASTICLIB, TORCHRUN)}
