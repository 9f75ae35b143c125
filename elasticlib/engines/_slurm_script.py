"""
The text of a Slurm job that runs one program on each of its nodes. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from elasticlib.engines._slurm_options import HIDDEN
from elasticlib.errors import ConfigError

_SRUN = "srun --nodes={0} --ntasks={0} --ntasks-per-node=1 --no-kill --wait=0 --kill-on-bad-exit=0"
"""A node that ends or is lost must not end the others: their launchers decide."""


def batch_script(
    options: Sequence[str], nodes: int, command: Sequence[str], of_step: Sequence[str] = (), mark: str = ""
) -> str:
    """
    Return the text of a batch script with *options* for sbatch, which runs *command* once on each of *nodes* nodes.

    *of_step* are more options for srun. At its end the script writes the status to the file *mark*, whose name ends
    with the number of the job's restarts.
    """
    header = "".join(f"#SBATCH {_quoted(option)}\n" for option in options)
    step = f"{_SRUN.format(nodes)} {shlex.join([*of_step, *command])}\n"
    noted = f'status=$?\necho "$status" > {shlex.quote(mark)}."${{SLURM_RESTART_COUNT:-0}}"\nexit "$status"\n'
    return f"#!/bin/bash\n{header}\n{step}{noted if mark else ''}"


def output_options(folder: str) -> tuple[str, ...]:
    """Return the options for the files of a job's output in *folder*. Raises `ConfigError`."""
    # Slurm replaces some of these characters in names of files, and \ changes the meaning of the others.
    if HIDDEN.search(folder) or "%" in folder or "\\" in folder:
        raise ConfigError.of_setting("folder", f"{folder!r} must be a path without %, \\ and line breaks")
    return (f"--output={folder}/output", f"--error={folder}/errors")


def _quoted(option: str) -> str:
    """Return *option* as sbatch reads it in a script."""
    if re.fullmatch(r"[\w@%+=:,./*\[\]-]+", option, re.ASCII):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'
