"""
Facts from the text of an entry point before it runs: its imports, and the variables that it sets
before torch.

Rules of this file: it runs nothing, and reads only a few of the project's files. In doubt a
module counts as imported, and a variable that the text names counts as set.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import math
import os
import stat
import sys
from collections.abc import Iterator, Sequence

from attrs import Factory, define, frozen

from elasticlib.preload._reads import is_lost_after_import
from elasticlib.workers import THREADS_VARIABLE

# Limits of a search that delays the launch: beyond them, torch counts as imported.
_MOST_FILES = 100
_MOST_BYTES = 1 << 20
_BY_NAME = frozenset({"importlib", "runpy", "pkgutil", "imp"})
"""Modules that import by computed names."""
_SETTERS_OF_OS = frozenset({"putenv", "unsetenv"})
_SETTERS_OF_MAPPINGS = frozenset({"setdefault", "pop", "__setitem__"})
_UNKNOWN = "*"
_LITERAL = THREADS_VARIABLE + "="


@define
class Text:
    """Facts in the files of an entry point."""

    imports: set[str] = Factory(set)
    """Top-level names of imported modules outside of the project."""
    is_whole: bool = True
    """False if an import may have a name that no statement shows, or a file could not be read."""
    words: set[str] = Factory(set)
    """Names and attributes in the code; of ``re.compile`` only the first."""
    sets: set[str] = Factory(set)
    """
    Variables that have no effect once torch is imported, and that a file names before it imports
    torch; ``*`` for any.
    """
    threads: int | None = None
    """OMP_NUM_THREADS, if a file sets it before anything else and in any case."""


@frozen
class _Part:
    """One statement of a file."""

    name: str | None
    """Name of the function or class that it defines."""
    words: frozenset[str]
    sets: frozenset[str]


@frozen
class _File:
    """Facts in one file."""

    names: tuple[tuple[str, bool], ...] = ()
    """Its imports, and for each True if it must be a module."""
    parts: tuple[_Part, ...] = ()
    is_read: bool = True


def read(path: str, folder: str, function: str | None = None, source: bytes | None = None) -> Text:
    """
    Read the file *path* and those in *folder* that it imports.

    *source* is the text of *path* if it is known already. With the name of a *function* in it,
    only the code that this function may call counts. What a file sets outside of functions was
    set in this program, when it imported the file.
    """
    reading = _Reading(folder)
    reading.add_file(path, _read(path) if source is None else _parsed(source))
    reading.follow_imports()

    text = reading.text
    uses_import_by_name = not text.imports.isdisjoint(_BY_NAME)
    text.is_whole = text.is_whole and not uses_import_by_name
    parts = reading.parts if function is None else _reached(function, reading.parts)
    for part in parts:
        _add(text, part)
    return text


@define
class _Reading:
    """
    The files that the imports of an entry point lead to.

    Each of them is pending, or was read; all are among the seen ones.
    """

    folder: str
    text: Text = Factory(Text)
    parts: list[_Part] = Factory(list)
    _pending: list[str] = Factory(list)
    _seen: set[str] = Factory(set)

    def follow_imports(self) -> None:
        """Read the files that are imported, and those that they import; stop at a hundred files."""
        while self._pending:
            if len(self._seen) > _MOST_FILES:
                self.text.is_whole = False
                return
            path = self._pending.pop()
            self.add_file(path, _read(path))

    def add_file(self, path: str, file: _File) -> None:
        """Add the content of a *file*, which is at *path*."""
        self._seen.add(path)
        self.text.is_whole &= file.is_read
        self.parts += file.parts
        for name, is_module in file.names:
            self._add_import(name, is_module, os.path.dirname(path))

    def _add_import(self, name: str, is_module: bool, importer: str) -> None:
        own = _files(name, self.folder, importer)
        self._pending += [each for each in own if each not in self._seen]
        # Before they are read, because files may import each other.
        self._seen.update(own)
        # Empty for a relative import.
        top = name.partition(".")[0]
        if is_module and not own and top:
            self.text.imports.add(top)


def _reached(function: str, parts: Sequence[_Part]) -> list[_Part]:
    """Return the functions and classes that *function* may use, directly or through others."""
    found = list[_Part]()
    words = {function}
    left = [part for part in parts if part.name is not None]
    new = _named_in(words, left)
    while new:
        found += new
        left = [part for part in left if part not in new]
        words = words.union(*(part.words for part in new))
        new = _named_in(words, left)

    return found


def _named_in(words: set[str], parts: Sequence[_Part]) -> list[_Part]:
    return [part for part in parts if part.name in words]


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
        return _read_cell(path)
    return _read_once(path, facts.st_mtime_ns, facts.st_size)


def _read_cell(name: str) -> _File:
    """Read a cell of a notebook, whose lines `linecache` has."""
    lines = linecache.getlines(name)
    if not lines:
        return _File(is_read=False)
    return _parsed("".join(lines).encode())


# The key includes time and size of the file, so an edited one is read again.
@functools.lru_cache(maxsize=256)
def _read_once(path: str, *_: int) -> _File:
    source = source_of(path, _MOST_BYTES)
    if source is None:
        return _File(is_read=False)
    return _parsed(source)


def source_of(path: str, most: float = math.inf) -> bytes | None:
    """
    Return the content of the script at *path*; None if it cannot be read, or has more than *most*
    bytes.

    A pipe is not read, because its content could not be read a second time.
    """
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
            return None
        with open(path, "rb") as file:
            return file.read()
    # ValueError: the path contains a NUL character.
    except (OSError, ValueError):
        return None


def tree_of(source: bytes) -> ast.Module | None:
    """Return the syntax tree of *source*; None if this Python cannot parse it."""
    try:
        return ast.parse(source)
    # A NUL character, or deep nesting, is not always a SyntaxError.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parsed(source: bytes) -> _File:
    tree = tree_of(source)
    if tree is None:
        return _File(is_read=False)

    early = len(_before_torch(tree.body))
    names = list[tuple[str, bool]]()
    parts = list[_Part]()
    for number, statement in enumerate(tree.body):
        nodes = list(ast.walk(statement))
        for node in nodes:
            names += _names(node)
        parts.append(_part(statement, nodes, is_early=number < early))

    return _File(tuple(names), tuple(parts))


def _part(statement: ast.stmt, nodes: Sequence[ast.AST], *, is_early: bool) -> _Part:
    """
    Return the facts on *statement*; the variables that it sets count only before torch is
    imported.
    """
    name = None
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        name = statement.name
    words = frozenset(itertools.chain.from_iterable(map(_words, nodes)))
    sets = frozenset(_variables(statement, nodes)) if is_early else frozenset[str]()
    return _Part(name, words, sets)


# Imports.


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """
    Yield the imports of *node*, and for each True if it must be a module.

    Imports in functions count too. A relative import begins with dots.
    """
    match node:
        case ast.Import(names=names):
            for each in names:
                yield each.name, True
        case ast.ImportFrom():
            yield from _names_from(node)
        # These may import by a name that no statement shows.
        case ast.Name(id="__import__" | "exec" | "eval"):
            yield "importlib", True


def _names_from(node: ast.ImportFrom) -> Iterator[tuple[str, bool]]:
    """Yield the imports of ``from a import b``, where ``b`` need not be a module."""
    base = "." * node.level + (node.module or "")
    if node.module:
        yield base, True
        base += "."
    else:  # from . import b
        yield base, False
    for each in node.names:
        yield base + each.name, False


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="re")):
            # Its ``compile`` is not torch's.
            return
        case ast.Attribute(attr=word) | ast.Name(id=word):
            yield word
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            yield from name.split(".")


def _files(name: str, folder: str, importer: str) -> list[str]:
    """Return the project's files that an import of *name* runs, from a file in *importer*."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        base = folder
    else:
        base = importer
        for _ in range(level - 1):
            base = os.path.dirname(base)

    found = []
    for part in name[level:].split("."):
        base = os.path.join(base, part)
        # As in Python, a package takes precedence over a module of its name.
        for candidate in (os.path.join(base, "__init__.py"), f"{base}.py"):
            if os.path.isfile(candidate):
                found.append(candidate)
                break

    return found


# Variables.


def _variables(statement: ast.stmt, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """
    Yield the variables that *statement*, with all its *nodes*, may set before torch is imported.

    Only variables count that have no effect later. A number that OMP_NUM_THREADS gets in any case
    is yielded as ``OMP_NUM_THREADS=number``.
    """
    literal = _literal_threads(statement)
    if literal:
        yield f"{_LITERAL}{literal}"
        return

    # By identity, since the same name may stand elsewhere in the statement.
    only_read = set[int]()
    for node in nodes:
        only_read.update(map(id, _read_only(node)))
    for node in nodes:
        if id(node) not in only_read:
            # In doubt, a variable counts as set if its name stands in the text.
            yield from filter(is_lost_after_import, _constants(node))
        if _sets_any(node):
            yield _UNKNOWN
        if _sets_threads(node):
            yield THREADS_VARIABLE


def _before_torch(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module up to its import of torch."""
    return list(itertools.takewhile(lambda statement: not _imports_torch(statement), body))


def _imports_torch(statement: ast.stmt) -> bool:
    """Return True for an import of torch that a module makes at once, or tries to make."""
    inner = statement.body if isinstance(statement, ast.Try) else [statement]
    names = itertools.chain.from_iterable(map(_names, inner))
    return any(name.partition(".")[0] == "torch" for name, _ in names)


def _constants(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            yield name


def _read_only(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the name of a variable that *node* only looks up."""
    match node:
        case (
            ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[name, *_])
            | ast.Subscript(ctx=ast.Load(), slice=name)
            | ast.Compare(left=name, ops=[ast.In() | ast.NotIn()])
        ):
            yield name


def _is_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="environ" | "environb") | ast.Name(id="environ" | "environb"):
            return True
    return False


def _sets_any(node: ast.AST) -> bool:
    """Return True for code that sets a variable whose name is not in the text."""
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=where, slice=key):
            return _is_environment(where) and not isinstance(key, ast.Constant)
        case ast.Call(func=ast.Attribute() as method):
            return _call_sets_any(node, method)
        case ast.AugAssign(target=target, value=value):
            return _is_environment(target) and not _shows_its_keys(value)
    return False


def _call_sets_any(call: ast.Call, method: ast.Attribute) -> bool:
    """Return the same of a *call* of a *method*."""
    if method.attr in _SETTERS_OF_OS:
        return _hides_its_key(call)
    if not _is_environment(method.value):
        return False
    if method.attr in _SETTERS_OF_MAPPINGS:
        return _hides_its_key(call)
    return method.attr == "update" and _update_hides_keys(call)


def _hides_its_key(call: ast.Call) -> bool:
    """Return True if the first argument is not a literal."""
    return bool(call.args) and not isinstance(call.args[0], ast.Constant)


def _update_hides_keys(call: ast.Call) -> bool:
    """Return True if an ``update`` takes a dictionary that is not written out in its call."""
    takes_another = not all(map(_shows_its_keys, call.args))
    # In the syntax tree, a keyword without a name is a ``**``.
    unpacks_another = not all(keyword.arg for keyword in call.keywords)
    return takes_another or unpacks_another


def _shows_its_keys(value: ast.expr) -> bool:
    """
    Return True for a dictionary that is written out, and takes nothing from another one (``**``).
    """
    # In the syntax tree, a ``**`` within the braces has None as its key.
    return isinstance(value, ast.Dict) and None not in value.keys


def _sets_threads(node: ast.AST) -> bool:
    """Return True for code that sets or removes OMP_NUM_THREADS, to any number."""
    match node:
        case (
            ast.Subscript(ctx=ast.Store() | ast.Del(), slice=name)
            | ast.Call(func=ast.Attribute(attr="putenv" | "pop"), args=[name, *_])
        ):
            return _is_threads_variable(name)
        case ast.keyword(arg=str(text)):
            return text == THREADS_VARIABLE
        case ast.Dict(keys=keys):
            return any(map(_is_threads_variable, keys))

    return False


def _is_threads_variable(name: ast.expr | None) -> bool:
    return isinstance(name, ast.Constant) and name.value == THREADS_VARIABLE


def _literal_threads(statement: ast.stmt) -> int | None:
    """Return the number in ``os.environ["OMP_NUM_THREADS"] = "number"``; None for other code."""
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=where, slice=name)],
            value=ast.Constant(value=str(number)),
        ) if _is_environment(where) and _is_threads_variable(name):
            is_count = number.isdecimal() and int(number) > 0
            return int(number) if is_count else None
    return None


def is_of_python(name: str) -> bool:
    """Return True for a module of Python's own, or the program itself."""
    return name in sys.stdlib_module_names or name == "__main__"
