"""
Parser of a command line and ``PET_*`` variables into a namespace with torch's names.

Rules of this file: the options are the rows of `cli._option_table`. Every value is read once, so that an
error names the option or variable that gave it. Arguments after the script go to the script unchanged,
without a ``--`` that separates the two.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elasticlib.cli._option_table import NOTES, NUMA_MODES, OPTIONS, Option
from elasticlib.cli._subcommands import SUBCOMMANDS
from elasticlib.errors import ConfigError
from elasticlib.spec import START_METHODS, WAITS

PROG = "elasticrun"
ROWS = [option for rows in OPTIONS.values() for option in rows]
SHELLS = ("bash", "zsh", "tcsh")
"""Shells for which every version of ``shtab`` makes completions."""
_WORDS = {"start_method": START_METHODS, "wait_for": WAITS, "numa_binding": NUMA_MODES}
"""Values of options that a shell can complete."""
GIVEN = "_given"
"""Attribute of a namespace: {name of a value: option or variable that gave it}."""
_ELSEWHERE = {
    **dict.fromkeys(("-n", "-np", "--np", "--nprocs", "--num-processes", "--gpus"), "--nproc-per-node"),
    **dict.fromkeys(("-N", "--nodes", "--num-nodes", "--num-machines"), "--nnodes"),
}
"""Options of other launchers (mpirun, srun, accelerate), and ours of the same meaning."""
_LIKENESS = 0.75
"""Similarity, from 0 to 1, from which on a name counts as a misspelling of another."""
_WITHOUT_VARIABLE = " and ".join(row.long for row in ROWS if not row.environment)


class _Read(argparse.Action):
    """Action that reads an option by its row, and notes that it was given."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, row: Option, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0 if row.is_flag else None, **settings)
        self._row = row

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        text = "1" if self._row.is_flag else values
        setattr(namespace, self.dest, _namespace_value(self._row, text, self._row.long))
        setattr(namespace, GIVEN, {**getattr(namespace, GIVEN, {}), self.dest: self._row.long})


class _PrintCompletion(argparse.Action):
    """Action that prints a shell's completion script, made by the package ``shtab``, and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        try:
            # Imported here, since the package is optional.
            import shtab
        except ImportError:
            self._check(values, SHELLS)
            parser.exit(1, "--print-completion needs the package shtab: pip install shtab\n")

        self._check(values, shtab.SUPPORTED_SHELLS)

        # The name of the completed command, also if this program was started in another way.
        parser.prog = PROG
        for action in parser._actions:
            action.choices = _WORDS.get(action.dest)
            if action.dest == "training_script":
                action.help, action.complete = "the script", shtab.FILE  # type: ignore[attr-defined]

        print(shtab.complete(parser, shell=values))
        parser.exit()

    def _check(self, shell: str, known: Sequence[str]) -> None:
        if shell not in known:
            raise argparse.ArgumentError(self, f"invalid choice: {shell!r} (choose from {', '.join(known)})")


class Parser(argparse.ArgumentParser):
    """
    An argparse parser with the launcher's options; programs may add further options.

    Its namespace has torch's names and types of values (``nnodes``, ``rdzv_conf`` and similar ones as text),
    with ``training_script`` and ``training_script_args``. *environ* gives ``PET_*`` defaults; None means
    the environment of the process. Parsing raises `ConfigError` for a value or variable that cannot be read.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, prog: str = PROG) -> None:
        self._environ = environ
        super().__init__(
            prog=prog,
            usage=f"{prog} [options] script [arguments of the script]",
            description="Starts N workers of a distributed PyTorch job, watches them and restarts them when one fails.",
            epilog="Long options may use underscores and may be shortened. Each takes its default from the "
            f"variable PET_<NAME>, such as PET_MAX_RESTARTS=3 ({_WITHOUT_VARIABLE} have none). "
            f"Other commands, with a --help of their own: {', '.join(f'{PROG} {name}' for name in SUBCOMMANDS)}.",
        )
        for title, rows in OPTIONS.items():
            group = self.add_argument_group(title, NOTES.get(title))
            for row in rows:
                default = "off" if row.is_flag else row.default or row.unset
                # argparse formats the help text with %.
                text = f"{row.help}{row.more} (default: {default})".replace("%", "%%")
                shown = None if row.is_flag else row.metavar or row.dest.upper()
                settings: dict[str, Any] = {"action": _Read, "row": row, "dest": row.dest, "metavar": shown}
                group.add_argument(*row.short, row.long, help=text, default=self._default(row), **settings)
                if (twin := f"--{row.dest}") != row.long:
                    group.add_argument(twin, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **settings)

        self.add_argument(
            "--print-completion",
            action=_PrintCompletion,
            metavar="SHELL",
            default=argparse.SUPPRESS,
            help=f"print a completion script for a shell ({', '.join(SHELLS)} ...; needs the package shtab) and exit",
        )
        self.add_argument(
            "--print_completion", action=_PrintCompletion, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        self.add_argument("training_script", metavar="script", help=argparse.SUPPRESS)
        self.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def _default(self, row: Option) -> Any:
        """Return the value for the namespace if the option is not given."""
        try:
            return _namespace_value(row, *self._unless_given(row))
        except ConfigError:
            # An invalid variable raises an error only when a command line is parsed.
            return _namespace_value(row, row.default, row.long)

    def _unless_given(self, row: Option) -> tuple[str | None, str]:
        """Return (text, source) of an option that is not on the command line."""
        environ = os.environ if self._environ is None else self._environ
        if row.environment and row.variable in environ:
            return environ[row.variable], row.variable
        return row.default, row.long

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as `argparse.ArgumentParser.parse_known_args`; end the program if the script is missing."""
        options, rest = self._split(sys.argv[1:] if args is None else list(args))

        # argparse needs a script here. A missing one is detected below, after errors of options.
        found, unknown = super().parse_known_args([*options, "--", "-"], namespace)
        if not rest:
            self.error("the script is missing: give a file, a module after -m, or a program after --no-python")
        found.training_script, *found.training_script_args = rest
        given: dict[str, str] = getattr(found, GIVEN, {})
        for row in ROWS:
            # Read only now, so that --help works with any variable.
            if row.dest not in given:
                text, source = self._unless_given(row)
                setattr(found, row.dest, _namespace_value(row, text, source))
                if source == row.variable:
                    given = {**given, row.dest: source}

        setattr(found, GIVEN, given)
        return found, unknown

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as `argparse.ArgumentParser.parse_args`; the error of an unknown option suggests a known one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            nearest = self._nearest(unknown[0], found)
            self.error(f"{message}; did you mean {nearest}?" if nearest else message)
        return found

    def _nearest(self, unknown: str, found: argparse.Namespace) -> str:
        """Return the most likely option for *unknown*, with its value if known; empty if there is none."""
        name, _, value = unknown.partition("=")
        meant = self._most_like(name)
        if not meant or self._option_string_actions[meant].nargs == 0:
            return meant
        # The value of the unknown option was parsed as the script, and the script as its first argument.
        if not value and found.training_script_args:
            value = found.training_script
        return f"{meant} {value}".rstrip()

    def _most_like(self, name: str) -> str:
        """Return the option that is most similar to *name*; empty if none is."""
        dashed = name.replace("_", "-")
        elsewhere = _ELSEWHERE.get(dashed)
        if elsewhere:
            return elsewhere

        # A short name is similar to too many options.
        if not name.startswith("--"):
            return ""

        names = [text for text in self._option_string_actions if text.startswith("--")]
        alike = difflib.get_close_matches(dashed, names, 1, _LIKENESS)
        return alike[0] if alike else ""

    def _split(self, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the options, spelled in full, and the script with its arguments."""
        options: list[str] = []
        rest = list(args)

        # A single dash is a script, and two dashes end the options.
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            name, equals, value = rest.pop(0).partition("=")
            action, name = self._named(name)
            options.append(name + equals + value)
            if action is not None and not equals:
                count = _taken(action, rest)
                options += rest[:count]
                del rest[:count]

        return options, _without_mark(rest)

    def _named(self, name: str) -> tuple[argparse.Action | None, str]:
        """
        Return the action and the full spelling of *name*; (None, *name*) if it is unknown or ambiguous.

        *name* may be an abbreviation, and may have dashes or underscores.
        """
        known = self._option_string_actions
        if name in known or not name.startswith("--"):
            # argparse separates a short option from a value that follows it at once, as in -t3.
            return known.get(name), name

        dashed = name.replace("_", "-")
        spelled = {text.replace("_", "-"): text for text in known if text.startswith("--")}
        if dashed in spelled:
            return known[spelled[dashed]], spelled[dashed]

        # An abbreviation: both spellings of an option count as one.
        meant = {known[text].dest: text for each, text in spelled.items() if each.startswith(dashed)}
        if len(meant) != 1:
            return None, name

        (text,) = meant.values()
        return known[text], text


def _without_mark(rest: list[str]) -> list[str]:
    """Return *rest* without the ``--`` that ends the options, directly before or after the script."""
    # argparse drops it in both places, so torchrun's scripts never see it.
    if rest[:1] == ["--"]:
        return rest[1:]
    if rest[1:2] == ["--"]:
        return [rest[0], *rest[2:]]
    return rest


def _taken(action: argparse.Action, rest: Sequence[str]) -> int:
    """Return the number of arguments after the option that belong to it."""
    if action.nargs is None:
        return 1
    if isinstance(action.nargs, int):
        return action.nargs
    values = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    return min(values, 1) if action.nargs == argparse.OPTIONAL else values


def _namespace_value(row: Option, text: str | None, source: str) -> Any:
    """Return the value of *text* in torch's namespace. Raises `ConfigError`, which names *source*."""
    value = row.value(text, source)
    return text if row.is_kept_as_text else value


def is_script(values: Mapping[str, Any]) -> bool:
    """Return True if the *values* name a file to run, and not a module or a program."""
    return bool(values["run_path"] or not (values["module"] or values["no_python"]))


def values_of(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Return {name: value} of all options, and {name: option or variable that gave it}.

    *args* is torch's namespace or ours; options that it lacks have their defaults. Raises `ConfigError` for
    a value that cannot be read.
    """
    given: dict[str, str] = getattr(args, GIVEN, {})
    return {row.dest: _value(row, getattr(args, row.dest, row.default), given) for row in ROWS}, given


def _value(row: Option, present: Any, given: Mapping[str, str]) -> Any:
    source = given.get(row.dest, row.long)
    if isinstance(present, str):
        # A default stays the same object: later code recognizes it by identity.
        return row.value(present, source)
    # A program has set a number for an option that torch's namespace keeps as text.
    if present is not None and row.is_kept_as_text:
        return row.value(str(present), source)
    return present


def about_option(error: ConfigError) -> ConfigError:
    """Return *error* with the name of its setting's option, such as --max-jobs for max_jobs."""
    return error.with_name(f"--{error.setting.replace('_', '-')}") if error.setting else error
