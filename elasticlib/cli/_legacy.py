"""
The legacy command ``python -m elasticlib.launch``: `run` with ``--use-env``, and ``--local-rank`` for the script.

Rules of this file: it adds only one option and one argument to `run`. (torch: ``torch.distributed.launch``)
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence

from elasticlib import launch as public, run
from elasticlib.cli._parser import Parser
from elasticlib.errors import ConfigError

PROG = "python -m elasticlib.launch"


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of `run.get_args_parser`, with ``--use-env``."""
    parser = Parser(prog=PROG)
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="do not pass --local-rank=N to the script, which must read the variable LOCAL_RANK (default: off)",
    )
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Return the namespace of `run.parse_args`, with ``use_env``.

    (torch: ``torch.distributed.launch.parse_args``)
    """
    return get_args_parser().parse_args(args)


def launch(args: argparse.Namespace) -> None:
    """
    Run the launch that `parse_args` has read, to its end.

    Raises `ConfigError`, and the errors of `elastic_launch`.

    (torch: ``torch.distributed.launch.launch``)
    """
    if not args.use_env:
        if args.no_python:
            raise ConfigError("--no-python: a program accepts no argument --local-rank: add --use-env")
        # A copy, because the namespace is the caller's.
        args = argparse.Namespace(**vars(args))
        # Each worker gets its own rank in place of ${local_rank}.
        args.training_script_args = ["--local-rank=${local_rank}", *args.training_script_args]
    run.launch(args, os.environ)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line to its end, as `run.main` does. (torch: ``torch.distributed.launch.main``)"""
    warnings.warn(
        "elasticlib.launch as a command is deprecated: use elasticrun, and let the script read the variable "
        "LOCAL_RANK instead of --local-rank",
        FutureWarning,
        stacklevel=2,
    )
    # Called by their names in the public module: a program may have replaced them there, as torch's tests do.
    run.carry_out(lambda: public.launch(public.parse_args(args)), whole_program=args is None)


__all__ = ["launch", "main", "parse_args"]
