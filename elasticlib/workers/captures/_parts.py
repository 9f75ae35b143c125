"""
The parts of a call that travel with it, and what to call each: arguments, variables, defaults, attributes.

Rules of this file: what a function or class takes along is what the pickler says that it sends of it, no second
opinion; a name says what it is, of which function, and in which cell.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib._in_notebooks import label
from elasticlib.spec import entrypoint_name

Reduces = Callable[[Any], Any]
"""What a pickler sends of an object (``reducer_override``)."""


@frozen(eq=False)
class Part:
    """An object that travels with a call, as errors and warnings call it."""

    name: str
    value: Any
    is_global: bool = False
    """True for a global variable that a function uses."""


class Call:
    """A call of *function*."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.sent = function, tuple(args), dict(kwargs)

    def arguments(self) -> Iterator[Part]:
        """Those of this call."""
        name = named(self.function)
        _, args, kwargs = self.sent
        for index, value in enumerate(args):
            yield Part(f"argument {index} of {name}", value)
        for key, value in kwargs.items():
            yield Part(f"argument {key}= of {name}", value)

    def attributes(self) -> Iterator[Part]:
        """Those of the object that is called, or whose method is."""
        function, name = self.function, named(self.function)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, (type, types.ModuleType)):
            for key, value in attributes(owner).items():
                yield Part(f"attribute {key!r} of the {type(owner).__qualname__} that {name} is of", value)
        elif not isinstance(function, (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)):
            for key, value in attributes(function).items():
                yield Part(f"attribute {key!r} of the {name} that is called", value)


def is_owner(value: object) -> bool:
    """Whether *value* takes along what has a name of its own."""
    return isinstance(value, (Call, types.FunctionType, functools.partial, type))


def parts_of(owner: Any, reduces: Reduces) -> Iterator[Part]:
    """What *owner* takes along."""
    if isinstance(owner, Call):
        yield from owner.arguments()
        yield from owner.attributes()
    elif isinstance(owner, functools.partial):
        name = named(owner.func)
        yield from (Part(f"bound argument {index} of {name}", value) for index, value in enumerate(owner.args))
        yield from (Part(f"bound argument {key}= of {name}", value) for key, value in owner.keywords.items())
    elif isinstance(owner, type):
        if _sent(owner, reduces) is not None:
            name = named(owner)
            yield from (Part(f"attribute {key!r} of the class {name}", value) for key, value in vars(owner).items())
    else:
        yield from _parts_of_function(owner, reduces)


def _sent(owner: Any, reduces: Reduces) -> Any:
    """The state that is sent of a function or class; None where its name is all."""
    reduced = reduces(owner)
    return reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None


def _parts_of_function(function: types.FunctionType, reduces: Reduces) -> Iterator[Part]:
    state = _sent(function, reduces)
    if state is None:
        return
    name, code = _named_function(function), function.__code__
    for variable, value in state[1]["__globals__"].items():
        yield Part(f"global variable {variable!r} that {name} uses", value, is_global=True)
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield Part(f"variable {variable!r} that {name} captures", cell.cell_contents)
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    for variable, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield Part(f"default of argument {variable!r} of {name}", value)
    for variable, value in (function.__kwdefaults__ or {}).items():
        yield Part(f"default of argument {variable!r} of {name}", value)
    for key, value in vars(function).items():
        yield Part(f"attribute {key!r} of {name}", value)


def attributes(owner: object) -> dict[str, Any]:
    """What *owner* has in its dictionary and its slots."""
    found: dict[str, Any] = {}
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):  # not set yet
                found[name] = object.__getattribute__(owner, name)
    return {**found, **getattr(owner, "__dict__", {})}


def named(value: Any) -> str:
    """What to call the function or class *value*, with its cell where it is a notebook's."""
    if isinstance(value, functools.partial):
        return named(value.func)
    return _with_cell(entrypoint_name(value), _code_of(value))


def _code_of(value: Any) -> types.CodeType | None:
    """Code that stands where *value* was defined."""
    code: Any = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
    if code is not None:
        return code if isinstance(code, types.CodeType) else None
    kind = value if isinstance(value, type) else type(value)
    codes = (getattr(getattr(each, "__func__", each), "__code__", None) for each in vars(kind).values())
    return next((code for code in codes if isinstance(code, types.CodeType)), None)


def _named_function(function: types.FunctionType) -> str:
    """As `named`, of *function* itself, which may be what a decorator made: that has another one's name."""
    code = function.__code__
    if hasattr(function, "__wrapped__") and code.co_name != function.__qualname__.rpartition(".")[2]:
        return f"{_with_cell(code.co_name, code)}, which a decorator put around {entrypoint_name(function)},"
    return _with_cell(entrypoint_name(function), code)


def _with_cell(name: str, code: types.CodeType | None) -> str:
    cell = label(code.co_filename) if code is not None else ""
    return f"{name} ({cell})" if cell else name
