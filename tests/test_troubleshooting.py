"""The page on errors and warnings quotes what the sources say, and leaves out no kind of error and no warning."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

from elasticlib import errors

HOUSE = pathlib.Path(__file__).resolve().parent.parent / "elasticlib"
PAGE = HOUSE / "docs" / "troubleshooting.md"
FILES = sorted(path for path in HOUSE.rglob("*.py") if "testing" not in path.relative_to(HOUSE).parts)
ANY = "\0"
"""What stands in a message for a value, whatever that is."""
LOGGED = frozenset({"warning", "error", "exception", "critical"})


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in *text*, without headings."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [re.split(r" ?\| ", line) for line in lines if not line.startswith(("message |", "class |"))]


@functools.cache
def quotes() -> dict[str, re.Pattern[str]]:
    """What the page quotes of messages, each with what finds it in a source."""
    messages = PAGE.read_text(encoding="utf-8").partition("\n## Before anything starts\n")[2]
    found = [quote for row in rows(messages) for quote in re.findall(r"`([^`]+)`", row[0])]
    return {quote: re.compile(".*?".join(map(re.escape, quote.split("..."))), re.DOTALL) for quote in found}


def text_of(node: ast.AST) -> str | None:
    """The text of a constant or an f-string, with `ANY` for each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d+)?[a-z]", ANY, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join((text_of(part) or "") if isinstance(part, ast.Constant) else ANY for part in node.values)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".of_setting"):
        setting, complaint = map(text_of, node.args)
        return f"{setting or ANY}={complaint}"
    return None


def texts(node: ast.AST) -> Iterator[str]:
    """All texts in *node* but docstrings."""
    documented = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Expr)}
    for each in ast.walk(node):
        if id(each) not in documented and (text := text_of(each)) is not None:
            yield text


def is_quoted(text: str) -> bool:
    return any(pattern.search(text) for pattern in quotes().values())


def calls(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The function's name and the first argument's text of each call in *path* that has a text there."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and node.args and (text := text_of(node.args[0])) is not None:
            yield ast.unparse(node.func), text


def says_something(text: str) -> bool:
    """Not only values."""
    return len(re.findall(r"[a-z]", text)) > 10


def test_a_quoted_message_stands_in_the_source() -> None:
    sources = {text for path in FILES for text in texts(tree(path))}

    assert len(quotes()) > 300
    assert [] == [quote for quote, pattern in quotes().items() if not any(map(pattern.search, sources))]


def test_a_quote_has_words_to_search_for() -> None:
    assert [] == [quote for quote in quotes() if quote != quote.strip() or len(re.findall(r"\w", quote)) < 8]


def test_every_kind_of_error_is_named_with_the_built_in_error_that_it_is() -> None:
    named = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows(section("Classes of errors"))}

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ElasticError)]
    assert {
        kind.__name__: {base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"} for kind in kinds
    } == named


def test_every_warning_of_the_warnings_module_is_quoted() -> None:
    given = [text for path in FILES for name, text in calls(path) if name in ("warnings.warn", "deprecated")]

    assert 7 == len(given)
    assert [] == [text for text in given if not is_quoted(text)]


def test_every_warning_and_error_that_is_logged_is_quoted() -> None:
    logged = [text for path in FILES for name, text in calls(path) if name.rpartition(".")[2] in LOGGED]

    assert len(logged) > 50
    assert [] == [text for text in logged if says_something(text) and not is_quoted(text)]


@pytest.mark.parametrize(
    "record",
    [
        node
        for node in tree(HOUSE / "records" / "_of_jobs.py").body
        if isinstance(node, ast.ClassDef) and re.search(r"logging\.(WARNING|ERROR)", ast.unparse(node))
    ],
    ids=lambda record: record.name,
)
def test_every_record_that_is_a_warning_or_an_error_is_quoted(record: ast.ClassDef) -> None:
    said = [text for text in texts(record) if says_something(text)]

    assert not said or any(map(is_quoted, said))
