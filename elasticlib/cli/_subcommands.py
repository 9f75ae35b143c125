"""
The subcommands of `elasticrun`: commands that launch nothing themselves.

Rules of this file: a script's name wins over a subcommand's, because job scripts with that name exist. Each subcommand
is one row; its module is imported only when it runs.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from types import MappingProxyType

SUBCOMMANDS = MappingProxyType(
    {
        "manifest": "elasticlib.cli._manifest",
        "stop": "elasticlib.cli._stop",
        "serve": "elasticlib.cli._serve",
        "submit": "elasticlib.cli._submit",
    }
)
"""
{name: module}. Its function ``main`` gets the arguments after the name, runs in `elasticlib.run.carry_out`, and raises
what the command line shows: an `ElasticError`, or SystemExit as argparse does.
"""


def subcommand(args: Sequence[str]) -> Callable[[], None] | None:
    """Return the call of the subcommand that *args* name; None if they start a script."""
    name = args[0] if args else ""
    if name not in SUBCOMMANDS or os.path.isfile(name):
        return None
    return functools.partial(_run, name, list(args[1:]))


def _run(name: str, args: Sequence[str]) -> None:
    importlib.import_module(SUBCOMMANDS[name]).main(args)
