"""
The subcommand ``elasticrun stop``: stop a job of this user that runs on this machine, on all of its nodes.
"""

from __future__ import annotations

import argparse
import math
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from attrs import frozen

from elasticlib.cli._parser import PROG
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.job import RunningLaunch, ask_to_stop, running_launches, wait_for_end


def main(args: Sequence[str]) -> None:
    """
    Stop a job, and wait for its end.

    Raises `ConfigError` if it does not run here, `ElasticError` if it does not answer, and SystemExit (status 2) for
    wrong usage.
    """
    given = parser().parse_args(args)
    _check_grace(given.grace)
    launches, silent = running_launches()
    chosen = [each for each in launches if given.job in (each.run_id, str(each.pid))]
    if not chosen:
        _refuse(given.job, launches, silent)

    # All are asked before one is waited for: they may be nodes of one job.
    answers = [(each, _answer_of(each, given)) for each in chosen]
    for launch, answer in answers:
        if answer is not None:
            _show(launch, answer, waits=not given.no_wait)

    unanswered = [launch.pid for launch, answer in answers if answer is None]
    if unanswered:
        raise ElasticError(_not_answered(unanswered))


@frozen
class _Answer:
    """The answer of a launch that was asked to stop."""

    connection: socket.socket | None
    """It ends with the launch; None if that has ended."""


def _answer_of(launch: RunningLaunch, given: argparse.Namespace) -> _Answer | None:
    """Ask *launch* to stop; return None if it does not answer."""
    try:
        return _Answer(ask_to_stop(launch, given.grace, only_node=given.node))
    except TimeoutError:
        return None


def _show(launch: RunningLaunch, answer: _Answer, *, waits: bool) -> None:
    if waits and answer.connection is not None:
        wait_for_end(answer.connection)
    is_stopping = not waits and answer.connection is not None
    print(f"{PROG} stop: {_name(launch)} {'is stopping' if is_stopping else 'has stopped'}", flush=True)


def _refuse(job: str | None, launches: Sequence[RunningLaunch], silent: Sequence[int]) -> NoReturn:
    """Raise the error for a *job* that is not among the *launches*, but may be one of the *silent* processes."""
    named = [pid for pid in silent if job == str(pid)]
    if named or (silent and job is not None):
        raise ElasticError(_not_answered(named or silent))
    raise ConfigError(_complaint(job, launches, silent))


def _not_answered(pids: Sequence[int]) -> str:
    names = ", ".join(f"launch {pid}" for pid in pids)
    verb = "has" if len(pids) == 1 else "have"
    return f"{names} {verb} not answered: try again, or find out if the process is stopped (state T in ps)"


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


def _complaint(job: str | None, launches: Sequence[RunningLaunch], silent: Sequence[int]) -> str:
    if not launches and silent:
        return f"JOB is missing; {_not_answered(silent)}"
    if not launches:
        return "no job of this user runs on this machine"
    names = ", ".join(map(_name, launches))
    what = "JOB is missing" if job is None else f"{job!r} does not run here"
    return f"{what}: give one of {names}"


def _name(launch: RunningLaunch) -> str:
    began = time.strftime("%H:%M:%S", time.localtime(launch.began))
    return f"{launch.run_id} ({launch.title}, process {launch.pid}, since {began})"
