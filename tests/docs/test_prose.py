"""Pages, help, messages and docstrings use the words of the field: habits that a reader stumbles over are counted."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "elasticlib" / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "elasticlib").rglob("*.py"))
HABITS = {
    "told, tells: write reported, sent, logged": (r"\b(?:told|tells)\b", 1, 1),
    "anew, whoever: write again, anyone who": (r"\b(?:anew|for ever|whoever|whichever)\b", 0, 0),
    "by itself: write alone, on its own": (r"\bby (?:itself|themselves)\b", 0, 0),
    "is no X: write is not a valid X": (r"\b(?:is|are|was|were) (?:no|none)\b (?!longer|more|other|need)", 0, 8),
    "is to be: write must be": (r"\b(?:is|are|was|were) to (?:be|go|have|run|wait)\b", 0, 0),
    "as it is: write unchanged, now": (r"\bas (?:it|they) (?:is|are)\b|\bas ever\b", 0, 2),
    "is there: write exists": (r"\b(?:is|are) there\b", 1, 2),
    "of which, of what: write a sentence of its own": (r"\bof (?:that|which|what|whom)\b(?! is)", 2, 4),
    "mend, take along: write repair, send": (r"\b(?:mend\w*|takes? along|took along|comes? to be)\b", 0, 0),
    "need not: write does not have to": (r"\b(?:has|have) not to\b|\bneed not\b", 0, 6),
}
"""A habit with what to write instead: its pattern, and how often pages and sources still have it at most."""
QUESTION = re.compile(r"(What|Who|Whose|Whom|Whoever|Whatever|Whether|Where|Have|Until when|Of)\b")
CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Whatever|Whether|Where|Have|That|How)\b")
PRIVATE_NAME = re.compile(
    r"^test_(?:who|what|whose|whoever|whatever|whether)_"
    r"|_(?:told|tells?|said|says?|heard|hears?|whoever|anew|guests?|office|parted|spoilt?|mended|mends|goes_on|brings)(?=_|$)"
    r"|_(?:is|are)_no_(?!longer|more)"
)
LONGEST = 32
MOST_LONG = 2


@functools.cache
def texts_of_pages() -> list[tuple[str, str]]:
    return [(path.name, re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)) for path in PAGES]


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    return [
        (str(path.relative_to(ROOT)), node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


@functools.cache
def texts_of_sources() -> list[tuple[str, str]]:
    return [
        (f"{path}:{node.lineno}", node.value)
        for path, node in nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]


def found(pattern: str, texts: list[tuple[str, str]]) -> list[str]:
    """Return the places of the pattern, with the text around them."""
    return [
        f"{place}: ...{text[max(0, hit.start() - 40) : hit.end() + 40]!r}"
        for place, text in texts
        for hit in re.finditer(pattern, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_grows_no_more(habit: str) -> None:
    pattern, in_pages, in_sources = HABITS[habit]
    pages, sources = found(pattern, texts_of_pages()), found(pattern, texts_of_sources())

    assert len(pages) <= in_pages, "\n".join([habit, *pages])
    assert len(sources) <= in_sources, "\n".join([habit, *sources])


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [(path, ast.get_docstring(node) or "") for path, node in nodes() if isinstance(node, kinds)]

    assert [] == [f"{path}: {text.splitlines()[0]}" for path, text in docstrings if QUESTION.match(text)]


def test_sentences_of_pages_are_short() -> None:
    long = []
    for name, text in texts_of_pages():
        for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n[*-] |\|", text):
            if len(sentence.split()) > LONGEST:
                long.append(f"{name}: {' '.join(sentence.split()[:12])} ...")

    assert len(long) <= MOST_LONG, "\n".join(long)


@functools.cache
def parsed_tests() -> list[tuple[str, ast.AST]]:
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def names_of_tests() -> list[str]:
    functions = [node.name for _, node in parsed_tests() if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


def test_names_of_tests_are_short() -> None:
    """A rule and its condition, in at most 70 characters."""
    names = names_of_tests()

    assert names
    assert [] == [name for name in names if len(name) > 70]


def test_names_of_tests_have_a_subject_and_the_words_of_the_field() -> None:
    assert [] == [name for name in names_of_tests() if PRIVATE_NAME.search(name)]


def test_docstrings_of_tests_begin_with_a_noun_or_an_imperative() -> None:
    texts = [
        (place, node.value.value)
        for place, node in parsed_tests()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]

    assert texts
    assert [] == [f"{place}: {text.strip()[:60]}" for place, text in texts if CLAUSE.match(text.strip())]
