"""
What the text of an entry point says of its imports, before it has run: which modules, and what it sets before them.

Rules of this file: nothing is run, and no more files are read than a few of the project's own; in doubt a module could
be imported, and a variable that is spoken of is set.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Iterator, Sequence

from attrs import Factory, define, frozen

from elasticlib.preload._reads import is_lost_after_import
from elasticlib.preload._source import source_of, tree_of
from elasticlib.workers import THREADS_VARIABLE

_MOST_FILES = 100
_MOST_BYTES = 1 << 20
_BY_NAME = frozenset({"importlib", "runpy", "pkgutil", "imp"})
"""Modules that import by names that no statement has."""
_UNKNOWN = "*"
_LITERAL = THREADS_VARIABLE + "="


@define
class Text:
    """What the files of an entry point say."""

    imports: set[str] = Factory(set)
    """Top-level names of modules that are no files of the project's."""
    is_whole: bool = True
    """False where something may be imported that no statement names, or a file could not be read."""
    words: set[str] = Factory(set)
    """Names and attributes in the code; of ``re.compile`` only the first."""
    sets: set[str] = Factory(set)
    """Variables that are lost once torch is imported, and spoken of before a file imports torch; ``*`` for any."""
    threads: int | None = None
    """OMP_NUM_THREADS, where a file sets it first of all, whatever happens."""


@frozen
class _Part:
    """One statement of a file."""

    name: str | None
    """Of the function or class that it defines."""
    words: frozenset[str]
    sets: frozenset[str]


@frozen
class _File:
    """What one file says."""

    names: tuple[tuple[str, bool], ...] = ()
    """What it imports, and whether that must be a module."""
    parts: tuple[_Part, ...] = ()
    is_read: bool = True


def read(path: str, folder: str, function: str | None = None, source: bytes | None = None) -> Text:
    """
    Read the file *path* and those in *folder* that it imports.

    Where the text of *path* is known already it is *source*. With the name of a *function* of it, only what that may
    call counts: what a file sets outside of functions was set in this very program, when it imported the file.
    """
    text, parts = Text(), list[_Part]()
    left, seen = [path], {path}
    while left:
        here = left.pop()
        file = _read(here) if source is None or here != path else _parsed(source)
        text.is_whole &= file.is_read
        parts += file.parts
        for name, is_module in file.names:
            own = _files(name, folder, os.path.dirname(here))
            top = name.partition(".")[0]
            if is_module and not own and top:
                text.imports.add(top)
            left += [each for each in own if each not in seen]
            seen.update(own)
        if len(seen) > _MOST_FILES:
            text.is_whole = False
            break
    text.is_whole &= not text.imports & _BY_NAME
    for part in parts if function is None else _reached(function, parts):
        _add(text, part)
    return text


def _reached(function: str, parts: Sequence[_Part]) -> list[_Part]:
    """The functions and classes that *function* may use: those whose names it mentions, and so on."""
    found, words = list[_Part](), {function}
    left = [part for part in parts if part.name is not None]
    while new := [part for part in left if part.name in words]:
        found += new
        left = [part for part in left if part not in new]
        words = words.union(*(part.words for part in new))
    return found


def _add(text: Text, part: _Part) -> None:
    text.words |= part.words
    for name in part.sets:
        if name.startswith(_LITERAL):
            text.threads = int(name.removeprefix(_LITERAL))
        else:
            text.sets.add(name)


def _read(path: str) -> _File:
    try:
        facts = os.stat(path)
    except OSError:
        lines = linecache.getlines(path)  # a cell's
        return _parsed("".join(lines).encode()) if lines else _File(is_read=False)
    return _read_once(path, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=256)
def _read_once(path: str, *_: int) -> _File:
    source = source_of(path, _MOST_BYTES)
    return _File(is_read=False) if source is None else _parsed(source)


def _parsed(source: bytes) -> _File:
    tree = tree_of(source)
    if tree is None:
        return _File(is_read=False)
    early = _before_torch(tree.body)
    names, parts = list[tuple[str, bool]](), list[_Part]()
    for statement in tree.body:
        nodes = list(ast.walk(statement))
        names += [each for node in nodes for each in _names(node)]
        words = frozenset(word for node in nodes for word in _words(node))
        sets = frozenset(_variables(statement, nodes)) if statement in early else frozenset[str]()
        defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        parts.append(_Part(statement.name if isinstance(statement, defines) else None, words, sets))
    return _File(tuple(names), tuple(parts))


# Imports.


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """
    What is imported anywhere, in functions too, and whether it must be a module: ``from a import b`` may mean another.

    Dots come first where it is relative.
    """
    match node:
        case ast.Import():
            yield from ((each.name, True) for each in node.names)
        case ast.ImportFrom():
            base = "." * node.level + (node.module or "")
            yield base, not base.endswith(".")
            yield from ((f"{base}{'' if base.endswith('.') else '.'}{each.name}", False) for each in node.names)
        case ast.Name(id="__import__" | "exec" | "eval"):
            yield "importlib", True


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="re")):
            return
        case ast.Attribute(attr=word) | ast.Name(id=word):
            yield word
        case ast.alias(name=name):
            yield from name.split(".")
        case ast.ImportFrom(module=str(name)):
            yield from name.split(".")


def _files(name: str, folder: str, here: str) -> list[str]:
    """The project's own files that an import of *name* runs, from a file in the folder *here*."""
    level = len(name) - len(name.lstrip("."))
    for _ in range(level - 1):
        here = os.path.dirname(here)
    base, found = here if level else folder, []
    for part in name[level:].split("."):
        base = os.path.join(base, part)
        candidates = (os.path.join(base, "__init__.py"), f"{base}.py")
        found += [each for each in candidates if os.path.isfile(each)][:1]
    return found


# Variables.


def _variables(statement: ast.stmt, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """
    Variables that *statement* may set, with all its *nodes*, of those that are lost once torch is imported.

    A number that OMP_NUM_THREADS gets in any case comes as ``OMP_NUM_THREADS=number``.
    """
    literal = _literal_threads(statement)
    if literal:
        yield f"{_LITERAL}{literal}"
        return
    only_read = {id(each) for node in nodes for each in _read_only(node)}
    for node in nodes:
        if id(node) not in only_read:
            yield from filter(is_lost_after_import, _constants(node))
        if _sets_any(node):
            yield _UNKNOWN
        if _sets_threads(node):
            yield THREADS_VARIABLE


def _before_torch(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module up to its import of torch."""
    for number, statement in enumerate(body):
        inner = statement.body if isinstance(statement, ast.Try) else [statement]
        names = (name for each in inner for name, _ in _names(each))
        if any(name.partition(".")[0] == "torch" for name in names):
            return body[:number]
    return body


def _constants(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            yield name


def _read_only(node: ast.AST) -> Iterator[ast.AST]:
    """The names of variables that the code looks up, and does not set."""
    match node:
        case ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[name, *_]):
            yield name
        case ast.Subscript(ctx=ast.Load(), slice=name) | ast.Compare(left=name, ops=[ast.In() | ast.NotIn()]):
            yield name


def _is_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="environ" | "environb") | ast.Name(id="environ" | "environb"):
            return True
    return False


def _sets_any(node: ast.AST) -> bool:
    """True for what sets a variable whose name is not in the text."""
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=where, slice=key):
            return _is_environment(where) and not isinstance(key, ast.Constant)
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv"), args=[key, *_]):
            return not isinstance(key, ast.Constant)
        case ast.Call(func=ast.Attribute(attr="setdefault" | "pop" | "__setitem__", value=where), args=[key, *_]):
            return _is_environment(where) and not isinstance(key, ast.Constant)
        case ast.Call(func=ast.Attribute(attr="update", value=where), args=args, keywords=keywords):
            is_plain = all(isinstance(each, ast.Dict) and None not in each.keys for each in args)
            return _is_environment(where) and not (is_plain and all(each.arg for each in keywords))
        case ast.AugAssign(target=target, value=value):
            return _is_environment(target) and not (isinstance(value, ast.Dict) and None not in value.keys)
    return False


def _sets_threads(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), slice=ast.Constant(value=name)) | ast.keyword(arg=name):
            return bool(name == THREADS_VARIABLE)
        case ast.Dict(keys=keys):
            return any(isinstance(each, ast.Constant) and each.value == THREADS_VARIABLE for each in keys)
        case ast.Call(func=ast.Attribute(attr="putenv" | "pop"), args=[ast.Constant(value=name), *_]):
            return bool(name == THREADS_VARIABLE)
    return False


def _literal_threads(statement: ast.stmt) -> int | None:
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=where, slice=ast.Constant(value=name))], value=ast.Constant(value=str(number))
        ):
            is_number = number.isdecimal() and int(number) > 0
            return int(number) if _is_environment(where) and name == THREADS_VARIABLE and is_number else None
    return None


def is_of_python(name: str) -> bool:
    """True for a module of Python's own, or the program itself."""
    return name in sys.stdlib_module_names or name == "__main__"
