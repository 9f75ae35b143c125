"""
The subcommand ``elasticrun submit``: run a script on many nodes as a job of Slurm.

Rules of this file: all is checked before Slurm gets the job, also the command that its nodes run.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence

from elasticlib.cli._option_table import read_nodes
from elasticlib.cli._parser import PROG, Parser, about_option, is_script
from elasticlib.cli._request import check_for_nodes
from elasticlib.engines import BatchOptions, SlurmValue, batch_script, check_nodes, submit_script
from elasticlib.errors import ConfigError

_log = logging.getLogger("elasticlib")
_ENGINES = ("slurm",)


def main(args: Sequence[str]) -> None:
    """
    Submit a job and print its number, or print its script.

    Raises `ConfigError` for a wrong value, `StartError` if Slurm refuses the job, SystemExit (2) for wrong usage.
    """
    given = parser().parse_args(args)
    launched = Parser(os.environ).parse_args(given.command)
    try:
        options = BatchOptions(given.nodes, given.time, given.partition, _values_of(given.sbatch), launched.requeue)
        if not given.print and "clusters" not in options.more:
            check_nodes(options.nodes, options.partition)
    except ConfigError as error:
        raise about_option(error) from error

    _check_job(launched, options.nodes)
    lines = options.lines(os.path.basename(launched.training_script))
    text = batch_script(lines, options.nodes, [*_launcher(), *given.command], options.lines_of_step())
    if given.print:
        print(text.rstrip(), flush=True)
        return

    script = launched.training_script
    # No error: the nodes may run in a container that has it.
    if is_script(vars(launched)) and not os.path.exists(script):
        _log.warning("%s does not exist on this machine: the nodes must have it, in %s", script, os.getcwd())
    print(_submitted(text, lines), flush=True)


def _check_job(job: argparse.Namespace, nodes: int) -> None:
    """Raise `ConfigError` for options of a launcher that would only fail on the *nodes* of the job."""
    if nodes > 1:
        _check_places(job, nodes)

    least, _ = read_nodes(job.nnodes)
    if least > nodes:
        raise ConfigError(
            f"--nnodes {job.nnodes}: the job has --nodes {nodes}, and would wait for more; leave --nnodes out"
        )
    check_for_nodes(job)


def _check_places(job: argparse.Namespace, nodes: int) -> None:
    """Raise `ConfigError` for options with which *nodes* launchers would not meet."""
    if job.standalone:
        raise ConfigError(f"--standalone: each of the {nodes} nodes would run a job of its own: leave it out")
    if str(job.node_rank) != "0":
        raise ConfigError(f"--node-rank {job.node_rank}: all {nodes} nodes would take this place: leave it out")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand's arguments."""
    made = argparse.ArgumentParser(
        prog=f"{PROG} submit",
        usage=f"{PROG} submit --nodes N [options] -- [options of {PROG}] SCRIPT ...",
        description=f"Submits a job that runs {PROG} on each of its nodes, and prints its number.",
        allow_abbrev=False,
    )
    made.add_argument("--engine", choices=_ENGINES, default="slurm", help="system that runs the job (default: slurm)")
    made.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    made.add_argument("--time", help="time limit, such as 1:30:00, or minutes")
    made.add_argument("--partition", help="partition of the nodes")
    made.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="other option of sbatch; may be repeated"
    )
    made.add_argument("--print", action="store_true", help="print the script instead of submitting it")
    made.add_argument(
        "command", nargs="+", metavar="SCRIPT", help=f"options of {PROG}, script and arguments, behind --"
    )
    return made


def _values_of(texts: Sequence[str]) -> Mapping[str, SlurmValue]:
    parts = [text.partition("=") for text in texts]
    return {name: value if sign else True for name, sign, value in parts}


def _launcher() -> list[str]:
    """Return the command that launches a node, as this program was found."""
    return [PROG] if shutil.which(PROG) else [sys.executable, "-m", "elasticlib.run"]


def _submitted(text: str, options: Sequence[str]) -> str:
    """Submit the script *text*, and return the number of its job."""
    with tempfile.NamedTemporaryFile("w", prefix="elasticrun-", suffix=".sh") as file:
        file.write(text)
        file.flush()
        return submit_script(file.name, options, os.environ)
