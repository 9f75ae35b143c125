"""
From a command line and ``PET_*`` variables to a namespace with torch's names.

Rules of this file: the options are the rows of `_cli_options`; every value is read once here, so that a bad one is
refused under the name by which it was given; what stands after the script is the script's, to the letter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elasticlib._cli_options import NOTES, OPTIONS, Option

PROG = "elasticrun"
ROWS = [option for rows in OPTIONS.values() for option in rows]
GIVEN = "_given"
"""Name in a namespace of {value's name: option or variable that gave it}."""


class Parser(argparse.ArgumentParser):
    """
    An argparse parser of the launcher's options, to which options may be added as to any other.

    Its namespace has torch's names and kinds of values (``nnodes``, ``rdzv_conf`` and the like as text), with
    ``training_script`` and ``training_script_args``. *environ* gives ``PET_*`` defaults; None takes the process'
    own when a command line is parsed. Raises `ConfigError` for a value that cannot be read.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, prog: str = PROG) -> None:
        self._environ = environ
        self._added: dict[str, bool] = {}
        """Options that others added: whether they take a value."""
        super().__init__(
            prog=prog,
            usage=f"{prog} [options] script [arguments of the script]",
            description="Starts N workers of a distributed PyTorch job, watches them and restarts them when one fails.",
            epilog="Each long option may be written with underscores or cut short, "
            "and takes its default from PET_<NAME>, as in PET_MAX_RESTARTS=3.",
        )
        for title, rows in OPTIONS.items():
            group = self.add_argument_group(title, NOTES.get(title))
            for row in rows:
                default = "off" if row.is_flag else row.default or row.unset
                text = f"{row.help} (default: {default})".replace("%", "%%")
                if row.is_flag:
                    group.add_argument(*row.short, row.long, action="store_const", const="1", help=text)
                else:
                    group.add_argument(*row.short, row.long, metavar=row.metavar or row.dest.upper(), help=text)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As `argparse.ArgumentParser.add_argument`."""
        action = super().add_argument(*args, **kwargs)
        self._added.update(dict.fromkeys(action.option_strings, action.nargs != 0))
        return action

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `argparse.ArgumentParser.parse_known_args`; ends the program where no script is named."""
        options, rest = self._part(sys.argv[1:] if args is None else list(args))
        found, unknown = super().parse_known_args(options, namespace)
        if not rest:
            self.error("the script is missing: give a file, a module after -m, or a program after --no-python")
        environ = os.environ if self._environ is None else self._environ
        given: dict[str, str] = {}
        for row in ROWS:
            text, source = getattr(found, row.dest), row.long
            if text is None and row.environment and row.variable in environ:
                text, source = environ[row.variable], row.variable
            if text is not None:
                given[row.dest] = source
            text = row.default if text is None else text
            value = row.value(text, source)
            setattr(found, row.dest, text if row.is_kept_as_text else value)
        setattr(found, GIVEN, given)
        found.training_script, *found.training_script_args = rest
        return found, unknown

    def _part(self, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Part the launcher's options, in the spelling with dashes, from the script and what follows it."""
        options: list[str] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            name, equals, value = rest.pop(0).partition("=")
            if name in self._added:
                takes_value = self._added[name] and not equals
            elif name.startswith("--"):
                name = name.replace("_", "-")
                found = [row for row in ROWS if row.long == name] or [row for row in ROWS if row.long.startswith(name)]
                takes_value = len(found) == 1 and not found[0].is_flag and not equals
            else:
                takes_value = any(name in row.short and not row.is_flag for row in ROWS) and not equals
            options.append(name + equals + value)
            if takes_value and rest:
                options.append(rest.pop(0))
        return options, rest[1:] if rest and rest[0] == "--" else rest


def values_of(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Every option's value by name, and by what option or variable it was given, from torch's or our namespace.

    What *args* lacks has its default. Raises `ConfigError` for a value that cannot be read.
    """
    given: dict[str, str] = getattr(args, GIVEN, {})
    return {row.dest: _value(row, getattr(args, row.dest, row.default), given) for row in ROWS}, given


def _value(row: Option, held: Any, given: Mapping[str, str]) -> Any:
    if held is None or (not isinstance(held, str) and not row.is_kept_as_text):
        return held
    return row.value(str(held), given.get(row.dest, row.long))
