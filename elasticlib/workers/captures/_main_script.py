"""
Facts on the caller's script: whether workers can import it, like those of multiprocessing, the
names that this defines, and the changes that the program has made since.

Rules of this file:

* It runs nothing. The script's text, and the line at which its program stands, give all facts. In
  doubt a function is sent by value, as from a notebook.
* A variable that the script defines is sent only if it is plain data that the program may have
  changed, by the script's text. It replaces the worker's own value if that differs.
* The import's own results for its process (a rank, a random number) stay each worker's own.
* All variables that the script does not define are sent. One that cannot be sent is named.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from elasticlib.errors import ConfigError, PicklingError
from elasticlib.preload import source_of, tree_of
from elasticlib.processes import absolute_path
from elasticlib.workers.captures._parts import named
from elasticlib.workers.child.program import _main

_RUN_BY_OTHERS = frozenset({"ipython", "ipython3", "pytest", "py.test"})
"""
Commands that run users' files: an import of the command would not define the users' functions.
"""
_BINDS_ANY_NAME = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr"})
_ANY = "*"
"""Stands for names that no statement shows."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
CACHED: Any = type(functools.lru_cache(len))
"""The class of the results of ``functools.lru_cache``."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@define
class ScriptText:
    """Facts on an import of a script, from its text."""

    guards: list[range]
    """Lines behind ``if __name__ == "__main__":``, which an import skips."""
    defined: set[str]
    """Names that the import defines."""
    redefined: set[str]
    """Names that the program sets behind its guard."""
    set_in_functions: set[str]
    """Global names that functions set, before or behind the guard."""
    handed_on: set[str]
    """
    Names whose objects the program may change after the import: it does more than read items and
    attributes.
    """
    is_whole: bool
    """False if the import may define more names than those."""

    def is_guarded(self, line: int) -> bool:
        """Return True if an import skips *line*."""
        return any(line in lines for lines in self.guards)

    def may_change(self, name: str) -> bool:
        """Return True if *name* may hold another object after the import."""
        return name in self.redefined or name in self.set_in_functions

    def may_change_in_place(self, name: str) -> bool:
        """Return True if the object that *name* holds may have another content after the import."""
        return name in self.handed_on

    def surely_lacks(self, name: str) -> bool:
        """Return True if the import does not define *name*."""
        known = self.defined | self.set_in_functions
        return self.is_whole and name not in known


@frozen
class ImportableMain:
    """The caller's ``__main__``, which workers import."""

    origin: _main.Origin
    text: ScriptText
    module: types.ModuleType

    def defines(self, obj: Any) -> bool:
        """
        Return True for a function or class that the import defines under its own name.

        It can be sent by that name.
        """
        if not isinstance(obj, (types.FunctionType, type, CACHED)):
            return False
        name = obj.__qualname__
        top = name.partition(".")[0]
        if top not in self.text.defined or self.text.may_change(top):
            return False
        return _main.attribute(self.module, name) is obj

    def is_own(self, obj: Any) -> bool:
        """Return True if the function or class *obj* names this module as its own."""
        return getattr(obj, "__module__", None) in _main.NAMES


def importable(choice: str | None) -> ImportableMain | None:
    """
    Return the ``__main__`` that workers import for a call that is made now.

    None if its functions are sent by value. *choice* is `LaunchConfig.main`. Raise `ConfigError`
    for ``import`` if the program has no script.
    """
    module = sys.modules.get("__main__")
    if choice == "value" or module is None:
        return None

    script = _script_of(module)
    if choice == "import":
        if script is None:
            raise ConfigError(
                "main='import': this program has no script that workers could import (it is a "
                "notebook, a package's __main__, or comes from stdin): leave main out"
            )
        return script

    if script is None:
        return None
    if _main.is_imported(module):
        return script

    # An import of an unguarded script would start its launch again.
    if _stands_behind_guard(module, script.text):
        return script

    return None


def _script_of(module: types.ModuleType) -> ImportableMain | None:
    """Return the script of the program *module*; None if it has no readable one."""
    origin = _origin_of(module)
    if origin is None:
        return None
    text = _text_of(module, origin.file)
    return None if text is None else ImportableMain(origin, text, module)


def has_script() -> bool:
    """
    Return True if workers could import the program's script, if its launches stood behind a
    guard.
    """
    module = sys.modules.get("__main__")
    return module is not None and _script_of(module) is not None


def _origin_of(module: types.ModuleType) -> _main.Origin | None:
    """
    Return the place from which the program *module* can be imported; None if it cannot be.

    The rules are those of multiprocessing.
    """
    if _main.is_imported(module):
        return _main.imported_origin()

    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    if os.path.basename(file) in _RUN_BY_OTHERS:
        return None

    name = getattr(getattr(module, "__spec__", None), "name", None)
    if name is None:
        return _main.Origin(None, absolute_path(file))

    # A package's, which multiprocessing excludes too.
    if name.rpartition(".")[2] == "__main__":
        return None

    return _main.Origin(name, absolute_path(file))


def _stands_behind_guard(module: types.ModuleType, text: ScriptText) -> bool:
    """
    Return True if the guarded part of the script runs now, in this thread or in the program's
    first.
    """
    frames = sys._current_frames()
    try:
        line = _running_line(module, frames)
    finally:
        # It holds this frame itself, and so the variables of all callers until the next
        # collection.
        frames.clear()

    # The script is at its end, and one of its threads continues.
    if line is None:
        return bool(text.guards)

    return text.is_guarded(line)


def _running_line(module: types.ModuleType, frames: Mapping[int, types.FrameType]) -> int | None:
    """Return the line of the script *module* at which its program stands; None after its end."""
    # A thread that makes the call has been started behind the guard, where the first thread stands.
    for ident in (threading.get_ident(), threading.main_thread().ident):
        for frame in _outward(frames.get(ident or 0)):
            if frame.f_globals is module.__dict__ and _is_of_script(frame.f_code):
                return frame.f_lineno
    return None


def _is_of_script(code: types.CodeType) -> bool:
    """Return True for the code of a script, False for text that it has passed to ``exec``."""
    return code.co_name == "<module>" and not code.co_filename.startswith("<")


def _outward(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# The text.


_texts: weakref.WeakKeyDictionary[types.ModuleType, ScriptText | None] = weakref.WeakKeyDictionary()
"""By module. Read once: a running program has the lines of the text with which it began."""


def _text_of(module: types.ModuleType, path: str) -> ScriptText | None:
    """
    Return the facts on the script *module* at *path*; None if its text cannot be read or parsed.
    """
    if module not in _texts:
        _texts[module] = _read(path)
    return _texts[module]


def _read(path: str) -> ScriptText | None:
    source = source_of(path)
    if source is None:
        return None
    tree = tree_of(source)
    if tree is None:
        return None
    return facts_of(tree)


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
    set_in_functions = set[str]()
    run_later: list[ast.AST] = [*guarded]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            set_in_functions.update(node.names)
        elif isinstance(node, _FUNCTIONS):
            run_later.append(node)

    return ScriptText(
        guards=[_lines_of(guard.body) for guard in guards],
        defined=defined - {_ANY},
        redefined=set(_bound_by(guarded)),
        set_in_functions=set_in_functions,
        handed_on=set(itertools.chain.from_iterable(map(_handed_on, run_later))),
        is_whole=_ANY not in defined,
    )


def _is_guard(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            # One false operand is enough to skip the block.
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
    last = body[-1]
    end = last.end_lineno or last.lineno
    return range(body[0].lineno, end + 1)


def _bound_by(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that *statements* bind in their own scope; ``*`` if there may be more."""
    left: list[ast.AST] = list(statements)
    while left:
        node = left.pop()
        yield from _bound_by_node(node)
        has_own_scope = isinstance(node, (*_SCOPES, *_COMPREHENSIONS))
        if not has_own_scope and not _only_annotates(node):
            left += ast.iter_child_nodes(node)


def _only_annotates(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def _bound_by_node(node: ast.AST) -> Iterator[str]:
    match node:
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.Name(id=name, ctx=ast.Store())
            | ast.MatchAs(name=str(name))
            | ast.MatchStar(name=str(name))
        ):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from map(_bound_by_import, names)
        case ast.Call(func=ast.Name(id=name)) if name in _BINDS_ANY_NAME:
            yield _ANY


def _bound_by_import(alias: ast.alias) -> str:
    """Return the name that an import binds: ``a`` for ``import a.b``, and the star for a star."""
    if alias.asname is not None:
        return alias.asname
    return alias.name.partition(".")[0]


def _handed_on(part: ast.AST) -> Iterator[str]:
    """
    Yield the names of *part* whose objects it may change.

    A name is left out if *part* only reads its items and attributes.
    """
    left = [part]
    while left:
        node = left.pop()
        yield from _changed_by_node(node)
        left += _parts_that_may_change(node)


def _changed_by_node(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Call(func=ast.Attribute() as method) if name := _root(method):
            yield name
        case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
            yield _root(node)


def _parts_that_may_change(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of *node*, except a name whose item or attribute it takes."""
    match node:
        case ast.Subscript(value=ast.Name(), slice=key):
            yield key
        case ast.Attribute(value=ast.Name()):
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _root(node: ast.AST) -> str:
    """Return the name at the beginning of ``name.attribute["item"]``; empty without one."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# Objects that a function reaches.


def reached_globals(functions: Sequence[Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the variables of *namespace* that *functions* use, directly or through others of it.

    The others are the functions and classes of *namespace* that they use. Modules, and variables
    that Python itself has set, are left out.
    """
    found: dict[str, Any] = {}
    left = list(functions)
    seen = set[int]()
    while left:
        each = left.pop()
        # By identity: a value may be unhashable, or compare as it likes.
        if id(each) in seen:
            continue
        seen.add(id(each))
        left += _parts_of(each)
        for name in _globals_of(each, namespace):
            if name not in found:
                found[name] = namespace[name]
                left.append(namespace[name])

    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}


def _globals_of(value: Any, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables of *namespace* that *value* names, if that is a function there."""
    if not isinstance(value, types.FunctionType):
        return
    if value.__globals__ is not namespace:
        return
    for name in _names_in(value.__code__):
        if name in namespace and not _is_of_python(name):
            yield name


def _is_of_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _parts_of(value: Any) -> list[Any]:
    """Return the objects that run when *value* is used, and may belong to the same script."""
    for kinds, parts in _PARTS:
        if isinstance(value, kinds):
            return parts(value)
    # An object that runs through its class. The user's own ``__getattr__`` is not called.
    wrapped = inspect.getattr_static(value, "__wrapped__", None) if callable(value) else None
    return [wrapped, type(value)]


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    captured = map(_content, function.__closure__ or ())
    return [vars(function).get("__wrapped__"), *captured]


def _parts_of_class(kind: type) -> list[Any]:
    if kind.__module__ not in _main.NAMES:
        return []
    return [*vars(kind).values(), *kind.__bases__]


_PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda method: [method.__func__, type(method.__self__)]),
    (functools.partial, lambda partial: [partial.func]),
    ((staticmethod, classmethod), lambda method: [method.__func__]),
    (property, lambda each: [each.fget, each.fset, each.fdel]),
    (type, _parts_of_class),
)
"""By kind, the parts of a value; the first matching kind counts."""


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


# The overlay: variables that workers need beside their own import of the script.

TryToSend = Callable[[Any, ImportableMain], None]
"""Raises the reason why a value cannot be sent."""
_DEPTH = 20
"""Depth to which containers are searched for parts that cannot be sent."""


def overlay_of(script: ImportableMain, functions: Sequence[Any], try_to_send: TryToSend) -> dict[str, Any]:
    """
    Return, by name, the variables that workers put over those of their own import of *script*.

    *functions* use them, and the import may make other ones:

    ===========================================================  ==================================
    variable                                                     in the result
    ===========================================================  ==================================
    made by the import, and not changed since                    no
    function or class of the script                              no: it is sent by its name
    may have changed                                             its value
    not made by the import, as far as the text shows             `IfAbsent` with its value
    cannot be sent, and the import may make it                   `Incomplete`: the worker compares
    cannot be sent, and the import certainly does not make it    `PicklingError` is raised
    ===========================================================  ==================================
    """
    found: dict[str, Any] = {}
    text = script.text
    for name, value in reached_globals(functions, script.module.__dict__).items():
        may_have_changed = _may_have_changed(name, value, text)
        is_made_by_import = name in text.defined and not may_have_changed
        if is_made_by_import or _is_sent_by_name(value, script):
            continue

        try:
            try_to_send(value, script)
        except Exception as error:
            # The function could not run in the workers.
            if text.surely_lacks(name):
                raise PicklingError(_refusal(name, value, functions, error)) from error
            found[name] = _incomplete(name, value, script, try_to_send, error)
        else:
            found[name] = value if may_have_changed else _main.IfAbsent(value)

    return found


def _is_sent_by_name(value: Any, script: ImportableMain) -> bool:
    """Return True for a function or class of the script."""
    return script.defines(value) and script.is_own(value)


def _incomplete(
    name: str, value: Any, script: ImportableMain, try_to_send: TryToSend, error: Exception
) -> _main.Incomplete:
    """Return the stand-in for a variable that cannot be sent, and that the import may define."""
    if name in script.text.redefined:
        rest = _main.CHANGED
    else:
        rest = _without_unsent(value, script, try_to_send)
    return _main.Incomplete(rest, f"its value, a {type(value).__qualname__}, cannot be sent ({_reason(error)})")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def overlay_contents(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of *variables* that `overlay_of` has found, by name."""
    return {name: _value_sent(value) for name, value in variables.items()}


def _value_sent(value: Any) -> Any:
    if isinstance(value, (_main.IfAbsent, _main.Incomplete)):
        return value.value
    return value


def _may_have_changed(name: str, value: Any, text: ScriptText) -> bool:
    """Return True if *name* may hold another object, or another content, than after the import."""
    if text.may_change(name):
        return True
    return text.may_change_in_place(name) and is_plain(value) and not _is_constant(value)


def is_plain(value: Any) -> bool:
    """Return True if *value* is data that can be compared: it can equal more than itself."""
    if isinstance(value, (type, types.ModuleType)) or callable(value):
        return False
    if value is None or isinstance(value, enum.Enum):
        return True
    equals: Any = type(value).__eq__
    return equals is not object.__eq__


def _is_constant(value: Any) -> bool:
    """
    Return True if *value* never changes, or is a tensor, to which a worker's optimizers may
    refer.
    """
    try:
        hash(value)
    except Exception:
        return False
    return True


def _without_unsent(value: Any, script: ImportableMain, try_to_send: TryToSend, depth: int = _DEPTH) -> Any:
    """Return *value* with `Withheld` in the place of its parts that cannot be sent."""
    try:
        try_to_send(value, script)
    except Exception:
        pass
    else:
        return value

    kind = type(value)
    if not depth:
        return _main.Withheld(kind.__qualname__)

    def inner(part: Any) -> Any:
        return _without_unsent(part, script, try_to_send, depth - 1)

    if _main.is_namespace(value):
        copy: Any = object.__new__(kind)
        vars(copy).update({name: inner(part) for name, part in vars(value).items()})
        return copy

    if kind is dict:
        return {key: inner(part) for key, part in value.items()}
    if kind in (list, tuple):
        return kind(map(inner, value))

    return _main.Withheld(kind.__qualname__)


def _refusal(name: str, value: Any, functions: Sequence[Any], error: Exception) -> str:
    users = [each for each in functions if _mentions(each, name)]
    user = named(users[0] if users else functions[0])
    kind = type(value).__qualname__
    return (
        f"global variable {name!r} that {user} uses, a {kind}, is defined under the script's "
        f"`if __name__ == '__main__':` and cannot be sent to the workers: {_reason(error)}; define it above that line, "
        "where workers import it, or inside the function"
    )


def _mentions(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return name in getattr(code, "co_names", ())
