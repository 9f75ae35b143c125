"""
The tables of the configuration reference that say what the code says.

    python -m tests.docs.configuration

writes them into `elasticlib/docs/configuration.md`, between the marks ``<!-- made from the code: NAME -->`` and
``<!-- end -->``; what stands elsewhere in the page is written by hand, and `test_configuration` holds that as well.
The words are those of ``--help`` (`elasticlib.cli._option_table`, `elasticlib.rendezvous._rdzv_options`) and, for
fields that no option has, of the docstrings below the fields (`elasticlib.spec`).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import pathlib
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

import elasticlib
from elasticlib import spec
from elasticlib.cli import _legacy
from elasticlib.cli._option_table import OPTIONS, Option
from elasticlib.cli._parser import Parser
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.rendezvous import _rdzv_options
from elasticlib.spec import LaunchConfig, WorkerSpec
from tests.docs import marked

PAGE = pathlib.Path(elasticlib.__file__).parent / "docs" / "configuration.md"
OTHER_NAMES = {
    "nnodes": ("min_nodes", "max_nodes"),
    "rdzv_id": ("run_id",),
    "rdzv_conf": ("rdzv_configs",),
    "numa_binding": ("numa_options",),
}
"""Fields of `LaunchConfig` whose option has another name."""
FIELDS = attrs.fields_dict(LaunchConfig)


def fields_of(option: Option) -> tuple[str, ...]:
    """The fields of `LaunchConfig` that the option fills."""
    return OTHER_NAMES.get(option.dest, (option.dest,) if option.dest in FIELDS else ())


def in_python(option: Option) -> tuple[str, ...]:
    """Return the names of the option for a job that is started in Python."""
    of_logs = inspect.signature(DefaultLogsSpecs).parameters
    return fields_of(option) or ((f"DefaultLogsSpecs({option.dest})",) if option.dest in of_logs else ())


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of *kind*, from its source."""
    (made,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: " ".join(words.value.value.split()).replace("``", "`")
        for field, words in zip(made.body, made.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(words, ast.Expr)
        and isinstance(words.value, ast.Constant)
    }


def code(text: object) -> str:
    """As Markdown shows it in a table, to the letter."""
    return f"`{text}`".replace("|", r"\|")


def row(*cells: str) -> str:
    """One line of a table; a cell without anything says so."""
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def head(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def kind_of(field: attrs.Attribute[Any]) -> str:
    """A field's type; where it is a choice of words, these."""
    name = str(field.type)
    alias = getattr(spec, name, None)
    choices = typing.get_args(alias) if typing.get_origin(alias) is typing.Literal else ()
    return " or ".join(map(code, choices)) if choices else code(name)


def default_of(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    factory: Any = field.default
    return code(repr(factory.factory() if isinstance(factory, attrs.Factory) else factory))  # type: ignore[arg-type]


def typed(option: Option) -> str:
    """Return the default of an option: its exact text, or a description where no text exists."""
    if option.is_flag:
        return "off"
    return code(option.default) if option.default else option.unset


def value_of(option: Option) -> str:
    """Return the placeholder for the option's value; empty for a flag."""
    return "" if option.is_flag else code(option.metavar or option.dest.upper())


def options(title: str) -> Iterator[str]:
    """The options of one group, with the fields that they fill."""
    yield from head("option", "variable", "value", "default", "in Python", "what it is")
    for option in OPTIONS[title]:
        yield row(
            ", ".join(map(code, (*option.short, option.long))),
            code(option.variable) if option.environment else "",
            value_of(option),
            typed(option),
            ", ".join(map(code, in_python(option))),
            option.help,
        )


def other_options() -> Iterator[str]:
    """Options of the command that say nothing of the job, and the legacy command's own."""
    yield from head("option", "what it does")
    seen = {row.long for rows in OPTIONS.values() for row in rows}
    for parser in (Parser({}), _legacy.get_args_parser()):
        for action in parser._actions:
            names = [name for name in action.option_strings if "_" not in name]
            if names and action.help is not argparse.SUPPRESS and not seen & set(names):
                seen |= set(names)
                yield row(
                    ", ".join(map(code, names)),
                    f"{action.help}{'; `python -m elasticlib.launch` alone' if parser.prog == _legacy.PROG else ''}",
                )


def launch_config() -> Iterator[str]:
    """The fields of `LaunchConfig`."""
    yield from head("field", "type, unit", "default", "option", "what it is")
    words = docstrings(LaunchConfig)
    filling = {name: option for rows in OPTIONS.values() for option in rows for name in fields_of(option)}
    for name, field in FIELDS.items():
        option = filling.get(name)
        seconds = words.get(name, "").startswith("Seconds") or (option is not None and option.metavar == "SECONDS")
        yield row(
            code(name),
            kind_of(field) + ", seconds" * seconds,
            default_of(field),
            code(option.long) if option is not None else "",
            words.get(name) or (option.help if option is not None else ""),
        )


def worker_spec() -> Iterator[str]:
    """The fields of `WorkerSpec`."""
    yield from head("field", "type", "default", "what it is")
    words = docstrings(WorkerSpec)
    for name, field in attrs.fields_dict(WorkerSpec).items():
        yield row(code(name), kind_of(field), default_of(field), words.get(name, "As in `LaunchConfig`."))


def keys() -> Iterator[str]:
    """The keys of ``--rdzv-conf``."""
    yield from head("key", "backends", "value", "default", "what it is", "torch reads it with")
    for name, key in _rdzv_options.RDZV_CONF_KEYS.items():
        taken = "all" if key.backends == _rdzv_options.ALL else ", ".join(sorted(key.backends))
        read = ", ".join(each for each, found in _rdzv_options._READ_BY_TORCH.items() if name in found)
        yield row(code(name), taken, key.rule, key.default, key.meaning, read)


def tables() -> dict[str, Iterable[str]]:
    """The lines of every table, by the name in its mark."""
    return {
        **{title.replace(" ", "_"): options(title) for title in OPTIONS},
        "other_options": other_options(),
        "launch_config": launch_config(),
        "worker_spec": worker_spec(),
        "keys": keys(),
    }


def written(page: str) -> str:
    """*page* with its tables as the code has them."""
    return marked.replaced(page, {name: "\n".join(lines) for name, lines in tables().items()})


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
