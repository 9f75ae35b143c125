"""
The subcommand ``elasticrun manifest``: print a job for Kubernetes, as ``kubectl apply -f -`` reads it.

Rules of this file: it reads options; `PodSettings` checks their values. Nothing is contacted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from json import dumps

from elasticlib.cli._option_table import read_nodes
from elasticlib.cli._parser import PROG, Parser, about_option
from elasticlib.cli._request import check_for_nodes
from elasticlib.engines import MANIFEST_KINDS, PodSettings, manifest_of
from elasticlib.errors import ConfigError

_SET_BY_MANIFEST = {
    "nnodes": "give --nodes before --",
    "shutdown_timeout": "give --grace before --",
    **dict.fromkeys(
        ("node_rank", "master_addr", "master_port", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
        "leave it out",
    ),
}
"""{option of elasticrun that the manifest sets: what to do instead}."""


def main(args: Sequence[str]) -> None:
    """Print the manifest. Raises `ConfigError` for a wrong value, SystemExit (2) for wrong usage."""
    made = parser()
    given = made.parse_args(args)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        made.error("the program is missing: manifest [OPTION ...] -- [OPTION of elasticrun ...] SCRIPT [ARGUMENT ...]")
    _check_options(command)
    try:
        settings = _settings(given, tuple(command))
        settings.check(given.kind)
    except ConfigError as error:
        raise about_option(error) from error
    print(dumps(manifest_of(given.kind, settings), indent=2))


def _settings(given: argparse.Namespace, command: tuple[str, ...]) -> PodSettings:
    try:
        least, most = read_nodes(given.nodes)
    except ConfigError as error:
        raise ConfigError(f"--nodes: {error}") from error
    return PodSettings(
        name=given.name,
        image=given.image,
        min_nodes=least,
        max_nodes=most,
        arguments=command,
        gpus=given.gpus,
        grace=given.grace,
        secret=given.secret,
        env=dict(given.env),
        namespace=given.namespace,
    )


def _check_options(command: Sequence[str]) -> None:
    """Raise for wrong options of the job, which would only show in its pods."""
    job, unset = Parser({}).parse_args(command), Parser({}).parse_args(["script"])
    for name, advice in _SET_BY_MANIFEST.items():
        value = getattr(job, name)
        if value != getattr(unset, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: {value!r} cannot be combined with a manifest, which sets it: {advice}")
    if job.requeue:
        raise ConfigError(f"--requeue: {job.requeue} is for jobs of Slurm: leave it out")
    check_for_nodes(job)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand's arguments."""
    made = argparse.ArgumentParser(
        prog=f"{PROG} manifest",
        description="Prints a job for Kubernetes with one pod for each node: pipe it to `kubectl apply -f -`.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--kind", choices=tuple(MANIFEST_KINDS), default="job", help="resource for the job (default: %(default)s)"
    )
    made.add_argument("--nodes", default="1", metavar="N or MIN:MAX", help="number of pods (default: %(default)s)")
    made.add_argument("--image", required=True, help="container image with elasticlib and the program")
    made.add_argument("--name", default="train", help="name of the job (default: %(default)s)")
    made.add_argument("--namespace", default="", help="namespace of the job (default: kubectl's own)")
    made.add_argument("--gpus", type=int, default=0, metavar="N", help="NVIDIA GPUs of each pod (default: 0)")
    made.add_argument(
        "--grace",
        type=int,
        default=30,
        metavar="SECONDS",
        help="seconds from SIGTERM to SIGKILL of a pod, 5 more than its workers get (default: %(default)s)",
    )
    made.add_argument("--secret", default="", metavar="NAME", help="Secret whose key `token` is the job's token")
    made.add_argument(
        "--env", action="append", default=[], type=_variable, metavar="NAME=VALUE", help="variable of the pods"
    )
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] SCRIPT ...", help="as for elasticrun")
    return made


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value
