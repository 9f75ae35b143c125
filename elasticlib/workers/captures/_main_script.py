"""
Whether workers can import the caller's script, as those of multiprocessing do, and what that import would define.

Rules of this file: nothing is run: the script's text, and the line at which its program stands, tell all; in doubt a
function goes by value, as from a notebook.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from elasticlib.errors import ConfigError
from elasticlib.preload import source_of, tree_of
from elasticlib.processes import absolute_path
from elasticlib.workers.child.program import _main

_RUN_BY_OTHERS = frozenset({"ipython", "ipython3", "pytest", "py.test"})
"""Commands that run what users wrote: an import of them defines nothing for it."""
_BINDS_ANY_NAME = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
CACHED: Any = type(functools.lru_cache(len))
"""The class of what ``functools.lru_cache`` makes."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@define
class ScriptText:
    """What the text of a script says of its import."""

    guards: list[range]
    """The lines behind ``if __name__ == "__main__":``, which an import leaves out."""
    defined: set[str]
    """Names that the import defines."""
    redefined: set[str]
    """Names that the program sets behind its guard."""
    set_in_functions: set[str]
    """Global names that functions set, before or behind the guard."""
    handed_on: set[str]
    """Names whose objects the program may change after the import: it does more than read items and attributes."""
    is_whole: bool
    """False where the import may define more names than those."""

    def is_guarded(self, line: int) -> bool:
        """Whether an import leaves *line* out."""
        return any(line in lines for lines in self.guards)

    def may_change(self, name: str) -> bool:
        """Whether what *name* holds may be another thing after the import."""
        return name in self.redefined or name in self.set_in_functions

    def may_change_in_place(self, name: str) -> bool:
        """Whether the object that *name* holds may have another content after the import."""
        return name in self.handed_on

    def surely_lacks(self, name: str) -> bool:
        """Whether the import does not define *name*."""
        return self.is_whole and name not in self.defined | self.set_in_functions


@frozen
class ImportableMain:
    """The caller's ``__main__``, which workers import."""

    origin: _main.Origin
    text: ScriptText
    module: types.ModuleType

    def defines(self, obj: Any) -> bool:
        """Whether *obj* is a function or class that the import defines under its own name, which can travel then."""
        if not isinstance(obj, (types.FunctionType, type, CACHED)):
            return False
        name = obj.__qualname__
        top = name.partition(".")[0]
        if top not in self.text.defined or self.text.may_change(top):
            return False
        return _main.attribute(self.module, name) is obj

    def is_own(self, obj: Any) -> bool:
        """Whether the function or class *obj* says that it is of this module."""
        return getattr(obj, "__module__", None) in _main.NAMES


def importable(choice: str | None) -> ImportableMain | None:
    """
    The ``__main__`` that workers import for a call that is made now; None where functions of it go by value.

    *choice* is `LaunchConfig.main`. Raises `ConfigError` for ``import`` where there is no script.
    """
    module = sys.modules.get("__main__")
    if choice == "value" or module is None:
        return None
    origin = _origin_of(module)
    text = None if origin is None else _text_of(module, origin.file)
    if origin is None or text is None:
        if choice == "import":
            raise ConfigError(
                "main='import': this program has no script that workers could import (it is a notebook, a package's "
                "__main__, or comes from stdin): leave it out"
            )
        return None
    if choice == "import" or _main.is_imported(module) or _stands_behind_guard(module, text):
        return ImportableMain(origin, text, module)
    return None


def has_script() -> bool:
    """Whether workers could import the program's script, if its launches stood behind a guard."""
    module = sys.modules.get("__main__")
    origin = None if module is None else _origin_of(module)
    return module is not None and origin is not None and _text_of(module, origin.file) is not None


def _origin_of(module: types.ModuleType) -> _main.Origin | None:
    """Where the program *module* can be imported from, by the rules of multiprocessing; None where it cannot be."""
    if _main.is_imported(module):
        return _main.imported_origin()
    name = getattr(getattr(module, "__spec__", None), "name", None)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or os.path.basename(file) in _RUN_BY_OTHERS:
        return None
    if name is not None and name.rpartition(".")[2] == "__main__":  # a package's, which multiprocessing leaves out too
        return None
    return _main.Origin(name, absolute_path(file))


def _stands_behind_guard(module: types.ModuleType, text: ScriptText) -> bool:
    """Whether the program is within the guarded part of its script now, in this thread or in its first one."""
    frames = sys._current_frames()
    threads = (threading.get_ident(), threading.main_thread().ident)
    try:
        for frame in itertools.chain.from_iterable(_outward(frames.get(ident or 0)) for ident in threads):
            if frame.f_globals is module.__dict__ and _is_of_script(frame.f_code):
                return text.is_guarded(frame.f_lineno)
    finally:
        frames.clear()  # it holds this very frame, and so the variables of all callers until the next collection
    return bool(text.guards)  # it has come to its end, and a thread goes on


def _is_of_script(code: types.CodeType) -> bool:
    """Whether *code* is a script's own, and no text that it has handed to ``exec``."""
    return code.co_name == "<module>" and not code.co_filename.startswith("<")


def _outward(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# The text.


_texts: weakref.WeakKeyDictionary[types.ModuleType, ScriptText | None] = weakref.WeakKeyDictionary()
"""By module: read once, since the lines of a program that runs are those of the text that it began with."""


def _text_of(module: types.ModuleType, path: str) -> ScriptText | None:
    """What the script *module* at *path* says of its import; None where it cannot be read again, or is no Python."""
    if module not in _texts:
        source = source_of(path)
        tree = None if source is None else tree_of(source)
        _texts[module] = None if tree is None else facts_of(tree)
    return _texts[module]


def facts_of(tree: ast.Module) -> ScriptText:
    """Return the facts on an import of the script whose syntax is *tree*."""
    guards = [each for each in tree.body if isinstance(each, ast.If) and _is_guard(each.test)]
    imported: list[ast.stmt] = []
    guarded: list[ast.stmt] = []
    for statement in tree.body:
        if statement in guards:
            guarded += statement.body
            imported += statement.orelse
        else:
            imported.append(statement)
    defined = set(_bound_by(imported))
    in_functions = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    return ScriptText(
        guards=[_lines_of(guard.body) for guard in guards],
        defined=defined - {"*"},
        redefined=set(_bound_by(guarded)),
        set_in_functions=in_functions,
        handed_on={name for part in (*guarded, *functions) for name in _handed_on(part)},
        is_whole="*" not in defined,
    )


def _is_guard(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return any(map(_is_guard, values))
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return _is_main_test(left, right) or _is_main_test(right, left)
    return False


def _is_main_test(name: ast.expr, text: ast.expr) -> bool:
    match name, text:
        case ast.Name(id="__name__"), ast.Constant(value="__main__"):
            return True
    return False


def _lines_of(body: Sequence[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _bound_by(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that *statements* bind in their own scope; ``*`` where there may be more."""
    left: list[ast.AST] = list(statements)
    while left:
        node = left.pop()
        yield from _bound_by_node(node)
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)) and not _only_annotates(node):
            left += ast.iter_child_nodes(node)


def _only_annotates(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def _bound_by_node(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.Import(names=names):
            yield from (each.asname or each.name.partition(".")[0] for each in names)
        case ast.ImportFrom(names=names):
            yield from (each.asname or each.name for each in names)  # of a star, the star
        case ast.Call(func=ast.Name(id=name)) if name in _BINDS_ANY_NAME:
            yield "*"


def _handed_on(part: ast.AST) -> Iterator[str]:
    """Names of *part* whose objects it may change: all but those of which it reads items and attributes alone."""
    left = [part]
    while left:
        node = left.pop()
        match node:
            case ast.Name(id=name):
                yield name
            case ast.Call(func=ast.Attribute() as method) if name := _root(method):
                yield name
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                yield _root(node)
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.value, ast.Name):
            left += [node.slice] if isinstance(node, ast.Subscript) else []
        else:
            left += ast.iter_child_nodes(node)


def _root(node: ast.AST) -> str:
    """Return the name at the beginning of ``name.attribute["item"]``; empty where there is none."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# What a function reaches.


def reached_globals(functions: Sequence[Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """
    The variables of *namespace* that *functions*, and the functions and classes that they use of it, speak of.

    Those that hold a module or what Python itself has put there are left out.
    """
    found: dict[str, Any] = {}
    left, seen = list(functions), set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        left += _parts_of(each)
        if isinstance(each, types.FunctionType) and each.__globals__ is namespace:
            for name in _names_in(each.__code__):
                if name in namespace and not (name.startswith("__") and name.endswith("__")) and name not in found:
                    found[name] = namespace[name]
                    left.append(namespace[name])
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}


def _parts_of(value: Any) -> list[Any]:
    """What runs when *value* is used, as far as it may be functions and classes of the same script."""
    if isinstance(value, types.FunctionType):
        cells = (each for each in value.__closure__ or ())
        return [vars(value).get("__wrapped__"), *(_content(each) for each in cells)]
    if isinstance(value, types.MethodType):
        return [value.__func__, type(value.__self__)]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, type):
        return [*vars(value).values(), *value.__bases__] if value.__module__ in _main.NAMES else []
    # The user's own ``__getattr__`` is asked for nothing.
    wrapped = inspect.getattr_static(value, "__wrapped__", None) if callable(value) else None
    return [wrapped, type(value)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)
