"""
The subcommand ``elasticrun stop``: stop a job of this user that runs on this machine, on all of its nodes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

from elasticlib.cli._parser import PROG
from elasticlib.errors import ConfigError
from elasticlib.job import RunningLaunch, ask_to_stop, running_launches, wait_for_end


def main(args: Sequence[str]) -> None:
    """
    Stop a job, and wait for its end.

    Raises `ConfigError` if it does not run here, and SystemExit (status 2) for wrong usage.
    """
    given = parser().parse_args(args)
    _check_grace(given.grace)
    launches = running_launches()
    chosen = [each for each in launches if given.job in (each.run_id, str(each.pid))]
    if not chosen:
        raise ConfigError(_complaint(given.job, launches))

    # All are asked before one is waited for: they may be nodes of one job.
    connections = [ask_to_stop(each, given.grace, only_node=given.node) for each in chosen]
    if not given.no_wait:
        for connection in filter(None, connections):
            wait_for_end(connection)

    state = "is stopping" if given.no_wait else "has stopped"
    for launch in chosen:
        print(f"{PROG} stop: {_name(launch)} {state}", flush=True)


def _check_grace(grace: float | None) -> None:
    if grace is not None and not 0 <= grace < math.inf:
        raise ConfigError(f"--grace: {grace!r} must be a number of seconds until SIGKILL, 0 or more")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand's arguments."""
    made = argparse.ArgumentParser(
        prog=f"{PROG} stop",
        description="Stops a job of this user that runs on this machine, on all of its nodes. Workers that call "
        "elasticlib.should_stop() save first.",
        allow_abbrev=False,
    )
    made.add_argument("job", nargs="?", metavar="JOB", help="run id of the job, or process id of its launcher")
    made.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="seconds until SIGKILL (default: the shutdown timeout of the job)",
    )
    made.add_argument("--node", action="store_true", help="stop this node only; the other nodes of the job go on")
    made.add_argument("--no-wait", action="store_true", help="do not wait for the end")
    return made


def _complaint(job: str | None, launches: Sequence[RunningLaunch]) -> str:
    if not launches:
        return "no job of this user runs on this machine"
    names = ", ".join(map(_name, launches))
    what = "JOB is missing" if job is None else f"{job!r} does not run here"
    return f"{what}: give one of {names}"


def _name(launch: RunningLaunch) -> str:
    began = time.strftime("%H:%M:%S", time.localtime(launch.began))
    return f"{launch.run_id} ({launch.title}, process {launch.pid}, since {began})"
