"""
Faults for pure objects, planted one at a time into their source: a condition negated, an update or an action dropped.

Rules of this file: source in, source out. A fault is named by its file, the function that holds it and what it does,
never by a line, so that the name lives as long as the place does.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from attrs import frozen

DROPPED = "_dropped"
"""Name that replaces the dropped target of an assignment."""
_UPDATES = ("evolve",)
"""Functions whose keywords are updates of a state."""
_JUDGES = ("any", "all")
"""Functions whose argument yields conditions."""

Put: TypeAlias = Callable[[ast.expr], None]
"""Puts another expression in the place of one."""


@frozen
class Planted:
    """One fault: `what` happens in the function `where`."""

    file: str
    where: str
    what: str
    number: int = -1
    """Its place among all of its file; -1: it is written by hand."""

    def __str__(self) -> str:
        return f"{self.file} {self.where}: {self.what}"


@frozen
class _Found:
    where: str
    what: str
    do: Callable[[], None]
    """Changes the tree."""


def faults(file: str, source: str) -> list[Planted]:
    """All that can be planted into that file, in the order of its text."""
    seen = Counter[tuple[str, str]]()
    named = []
    for number, found in enumerate(_Finder().module(ast.parse(source))):
        seen[found.where, found.what] += 1
        again = seen[found.where, found.what]
        named.append(Planted(file, found.where, f"{found.what} ({again})" if again > 1 else found.what, number))
    return named


def plant(source: str, number: int) -> str:
    """The source with the fault of that place in the list of `faults`."""
    tree = ast.parse(source)
    [*_Finder().module(tree)][number].do()
    return f"{ast.unparse(ast.fix_missing_locations(tree))}\n"


def _no(condition: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), condition)


def _short_source(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]}...{text[-27:]}"


def _into(owner: ast.AST, name: str, index: int | None = None) -> Put:
    def put(expression: ast.expr) -> None:
        if index is None:
            setattr(owner, name, expression)
        else:
            getattr(owner, name)[index] = expression

    return put


class _Finder:
    """Walks through one module; knows in which function it is, and which names that one has bound so far."""

    def __init__(self) -> None:
        self._where: list[str] = []
        self._bound: set[str] = set()
        self._judges = False
        """True if the function returns a bool."""
        self._whole: set[ast.expr] = set()
        """Updates of one thing: without it nothing of them is left, and that is a fault already."""

    def module(self, tree: ast.Module) -> Iterator[_Found]:
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield from self._definition(node)

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> Iterator[_Found]:
        self._where.append(node.name)
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                    yield from self._definition(each)
        else:
            bound, judges = self._bound, self._judges
            arguments = node.args
            self._bound = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            self._judges = node.returns is not None and ast.unparse(node.returns) == "bool"
            yield from self._block(node.body)
            self._bound, self._judges = bound, judges
        self._where.pop()

    def _found(self, what: str, do: Callable[[], None]) -> _Found:
        return _Found(".".join(self._where), what, do)

    # Statements.

    def _block(self, body: list[ast.stmt]) -> Iterator[_Found]:
        for index, statement in enumerate(body):
            yield from self._statement(body, index, statement)

    def _statement(self, body: list[ast.stmt], index: int, node: ast.stmt) -> Iterator[_Found]:
        def drop() -> None:
            body[index] = ast.Pass()

        match node:
            case ast.FunctionDef():
                yield from self._definition(node)
            case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never" | "assert_type"))):
                return  # for the type checker
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield self._found(f"without {_short_source(node)}", drop)
                yield from self._expression(node.value, _into(node, "value"))
            case ast.Assign(targets=targets):
                if _updates(node.value, ast.unparse(targets[-1])):
                    self._whole.add(node.value)
                for place, target in enumerate(targets):
                    yield from self._target(target, _into(node, "targets", place))
                self._bind(targets)
                yield from self._expression(node.value, _into(node, "value"), judged=_is_condition(node.value))
            case ast.If() | ast.While():
                yield from self._condition(node.test, _into(node, "test"))
                yield from self._block(node.body)
                yield from self._block(node.orelse)
            case ast.Return(value=ast.expr() as value):
                yield from self._emitted(value)
                yield from self._expression(value, _into(node, "value"), judged=self._judges)
            case ast.Match():
                yield from self._expression(node.subject, _into(node, "subject"))
                for case in node.cases:
                    if case.guard is not None:
                        yield from self._condition(case.guard, _into(case, "guard"))
                    yield from self._block(case.body)
            case ast.For(target=target):
                self._bind([target])
                yield from self._expression(node.iter, _into(node, "iter"))
                yield from self._block(node.body)
            case ast.Try():
                for block in (node.body, *(each.body for each in node.handlers), node.orelse, node.finalbody):
                    yield from self._block(block)
            case _:
                for name, value in ast.iter_fields(node):
                    if isinstance(value, ast.expr):
                        yield from self._expression(value, _into(node, name))

    def _bind(self, targets: Sequence[ast.expr]) -> None:
        self._bound |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}

    def _target(self, target: ast.expr, put: Put) -> Iterator[_Found]:
        """A name that is new holds nothing that could stay as it is."""
        if isinstance(target, ast.Tuple):
            for index, each in enumerate(target.elts):
                yield from self._target(each, _into(target, "elts", index))
        elif isinstance(target, ast.Starred):
            yield from self._target(target.value, _into(target, "value"))
        elif not isinstance(target, ast.Name) or target.id in self._bound:
            yield self._found(f"{_short_source(target)} stays", lambda: put(ast.Name(DROPPED, ast.Store())))

    def _emitted(self, value: ast.expr) -> Iterator[_Found]:
        """The actions that a step returns beside the new state."""
        if isinstance(value, ast.Tuple) and value.elts and isinstance(actions := value.elts[-1], ast.Tuple):
            for index, each in enumerate(actions.elts):
                yield self._found(
                    f"without the action {_short_source(each)}", lambda index=index: actions.elts.pop(index)
                )

    # Expressions.

    def _condition(self, node: ast.expr, put: Put) -> Iterator[_Found]:
        yield self._found(f"not ({_short_source(node)})", lambda: put(_no(node)))
        yield from self._expression(node, put, judged=True, negated=True)

    def _expression(self, node: ast.expr, put: Put, *, judged: bool = False, negated: bool = False) -> Iterator[_Found]:
        """*judged*: its truth is what counts; *negated*: its negation is among the faults already."""
        if judged and not negated and _is_condition(node):
            yield self._found(f"not ({_short_source(node)})", lambda: put(_no(node)))
        match node:
            case ast.BoolOp(values=values):
                for index, each in enumerate(values):
                    into = _into(node, "values", index)
                    if isinstance(each, (ast.Constant, ast.JoinedStr)):
                        continue
                    if judged or index < len(values) - 1 or _is_condition(each):
                        yield from self._condition(each, into)
                    else:
                        yield from self._expression(each, into)
            case ast.UnaryOp(op=ast.Not()):
                yield from self._expression(node.operand, _into(node, "operand"), judged=True, negated=True)
            case ast.IfExp():
                yield from self._condition(node.test, _into(node, "test"))
                yield from self._expression(node.body, _into(node, "body"), judged=judged)
                yield from self._expression(node.orelse, _into(node, "orelse"), judged=judged)
            case ast.Call():
                yield from self._call(node)
            case _:
                yield from self._inside(node)

    def _call(self, node: ast.Call) -> Iterator[_Found]:
        name = ast.unparse(node.func)
        if name in _UPDATES and node not in self._whole:
            for keyword in node.keywords:
                if _updates(keyword.value, f"{ast.unparse(node.args[0])}.{keyword.arg}"):
                    self._whole.add(keyword.value)
                what = f"{keyword.arg} stays, not {_short_source(keyword.value)}"
                yield self._found(what, lambda keyword=keyword: node.keywords.remove(keyword))
        yield from self._inside(node, judges=name in _JUDGES)

    def _inside(self, node: ast.AST, *, judges: bool = False) -> Iterator[_Found]:
        for name, value in ast.iter_fields(node):
            for index, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if judges and isinstance(each, ast.GeneratorExp):
                    yield from self._expression(each.elt, _into(each, "elt"), judged=True)
                    yield from self._generators(each.generators)
                elif isinstance(each, ast.expr):
                    yield from self._expression(each, _into(node, name, index))
                elif isinstance(each, ast.comprehension):
                    yield from self._generators([each])
                elif isinstance(each, ast.keyword):
                    yield from self._expression(each.value, _into(each, "value"))

    def _generators(self, generators: list[ast.comprehension]) -> Iterator[_Found]:
        for each in generators:
            for place, test in enumerate(each.ifs):
                yield from self._condition(test, _into(each, "ifs", place))
            yield from self._expression(each.iter, _into(each, "iter"))


def _updates(node: ast.expr, what: str) -> bool:
    """Return whether *node* is *what* with exactly one field changed."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in _UPDATES or len(node.keywords) != 1:
        return False
    return ast.unparse(node.args[0]) == what


def _is_condition(node: ast.expr) -> bool:
    return isinstance(node, (ast.Compare, ast.BoolOp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
