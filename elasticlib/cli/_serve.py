"""
The subcommand ``elasticrun serve``: host the stores and coordinators of jobs outside their nodes.

Rules of this file: it reads options; `ServerSettings` checks their values.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from elasticlib.cli._parser import PROG, about_option
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import ServerSettings, serve_until_signal, tokens_of_server
from elasticlib.spec import TOKEN_VARIABLE
from elasticlib.utils import LOG_LEVEL_VARIABLE


def main(args: Sequence[str]) -> None:
    """Serve until a signal comes. Raises `ConfigError` for a wrong value, SystemExit (2) for wrong usage."""
    given = parser().parse_args(args)

    # Users of a server want to see which jobs run.
    if not os.environ.get(LOG_LEVEL_VARIABLE):
        logging.getLogger("elasticlib").setLevel(logging.INFO)

    # Torch reports each wait of a store that is over, which is usual here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        settings = ServerSettings(**vars(given), tokens=tokens_of_server(os.environ))
        serve_until_signal(settings, lambda endpoint: _say(endpoint, settings))
    except ConfigError as error:
        raise about_option(error) from error


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand's arguments."""
    default = ServerSettings()
    made = argparse.ArgumentParser(
        prog=f"{PROG} serve",
        description="Coordinates jobs of --rdzv-backend c10d outside their nodes, so that each of these may die. "
        "Start it before the nodes, and give them its address as --rdzv-endpoint. "
        "SIGTERM or Ctrl-C ends it, and the jobs that run.",
        epilog=f"If {TOKEN_VARIABLE} is set, only jobs with the same token are served.",
    )
    made.add_argument(
        "--port", type=int, default=default.port, help="port of the endpoint; 0: any free port (default: %(default)s)"
    )
    made.add_argument(
        "--host", default=default.host, help="name or address of this machine to listen at (default: all its addresses)"
    )
    made.add_argument(
        "--max-jobs", type=int, default=default.max_jobs, help="most jobs at one time (default: %(default)s)"
    )
    return made


def _say(endpoint: str, settings: ServerSettings) -> None:
    token = ", only with its token" if None not in settings.tokens else ""
    print(f"{PROG} serve: at {endpoint}, for {settings.max_jobs} jobs at once{token}", flush=True)
