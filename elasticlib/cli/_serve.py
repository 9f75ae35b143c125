"""
The subcommand ``elasticrun serve``: host the stores and coordinators of jobs outside their nodes.

Rules of this file: it reads options; `rendezvous.serving` checks their values. Only torch's stores are imported.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from elasticlib.cli._parser import PROG
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import DEFAULT_PORT, MOST_JOBS, import_stores, serve_until_signal
from elasticlib.spec import TOKEN_VARIABLE
from elasticlib.utils import LOG_LEVEL_VARIABLE

_OPTIONS = {"port": "--port", "host": "--host", "max_jobs": "--max-jobs"}


def main(args: Sequence[str]) -> None:
    """Serve until a signal comes. Raises `ConfigError` for a wrong value, SystemExit (2) for wrong usage."""
    given = parser().parse_args(args)

    # A server's user wants to see which jobs run.
    if not os.environ.get(LOG_LEVEL_VARIABLE):
        logging.getLogger("elasticlib").setLevel(logging.INFO)

    # Torch reports each wait of a store that is over, which is usual here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Not all of torch: no user code runs in this process.
    import_stores()
    try:
        serve_until_signal(given.port, given.host, given.max_jobs, _say)
    except ConfigError as error:
        if error.setting in _OPTIONS:
            raise error.with_name(_OPTIONS[error.setting]) from error
        raise


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand's arguments."""
    made = argparse.ArgumentParser(
        prog=f"{PROG} serve",
        description="Coordinates jobs of --rdzv-backend c10d outside their nodes, so that each of these may die. "
        "Start it before the nodes, and give them its address as --rdzv-endpoint. "
        "SIGTERM or Ctrl-C ends it, and the jobs that run.",
        epilog=f"If {TOKEN_VARIABLE} is set, only jobs with the same token are served.",
    )
    made.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port of the endpoint; 0: any free port (default: %(default)s)"
    )
    made.add_argument(
        "--host", default="", help="name or address of this machine to listen at (default: all its addresses)"
    )
    made.add_argument("--max-jobs", type=int, default=MOST_JOBS, help="most jobs at one time (default: %(default)s)")
    return made


def _say(text: str) -> None:
    print(f"{PROG} serve: {text}", flush=True)
