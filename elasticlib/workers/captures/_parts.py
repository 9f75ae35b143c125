"""
The parts of a call that are sent with it, and their names: arguments, variables, defaults,
attributes.

Rules of this file: only the pickler decides what is sent of a function or class, and nothing else
counts as a part. A name describes the part, its function, and its cell.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib.notebook import cell_label
from elasticlib.spec import entrypoint_name

Reduces = Callable[[Any], Any]
"""Returns the pickler's reduction of an object (``reducer_override``)."""
_CALLED_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
"""Kinds of callables whose attributes do not affect their call."""


@frozen(eq=False)
class Part:
    """An object that is sent with a call, and its name in errors and warnings."""

    name: str
    value: Any
    is_global: bool = False
    """True for a global variable that a function uses."""


class CapturedCall:
    """A call of *function*."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.sent = function, tuple(args), dict(kwargs)

    def arguments(self) -> Iterator[Part]:
        """Yield the arguments of this call."""
        name = named(self.function)
        _, args, kwargs = self.sent
        for index, value in enumerate(args):
            yield Part(f"argument {index} of {name}", value)
        for key, value in kwargs.items():
            yield Part(f"argument {key}= of {name}", value)

    def attributes(self) -> Iterator[Part]:
        """Yield the attributes of the object that is called, or whose method is."""
        function = self.function
        name = named(function)
        owner = getattr(function, "__self__", None)
        is_method = owner is not None and not isinstance(owner, (type, types.ModuleType))
        if is_method:
            kind = type(owner).__qualname__
            for key, value in attributes(owner).items():
                yield Part(f"attribute {key!r} of the {kind} that {name} is of", value)
        elif not isinstance(function, _CALLED_BY_NAME):
            for key, value in attributes(function).items():
                yield Part(f"attribute {key!r} of the {name} that is called", value)


def is_owner(value: object) -> bool:
    """Return True if *value* has captures with names of their own."""
    return isinstance(value, (CapturedCall, types.FunctionType, functools.partial, type))


def parts_of(owner: Any, reduces: Reduces) -> Iterator[Part]:
    """Return the captures of *owner*, for which `is_owner` must be true."""
    if isinstance(owner, CapturedCall):
        return itertools.chain(owner.arguments(), owner.attributes())
    if isinstance(owner, functools.partial):
        return _parts_of_partial(owner)
    if isinstance(owner, type):
        return _parts_of_class(owner, reduces)
    return _parts_of_function(owner, reduces)


def _parts_of_partial(partial: functools.partial[Any]) -> Iterator[Part]:
    name = named(partial.func)
    for index, value in enumerate(partial.args):
        yield Part(f"bound argument {index} of {name}", value)
    for key, value in partial.keywords.items():
        yield Part(f"bound argument {key}= of {name}", value)


def _parts_of_class(kind: type, reduces: Reduces) -> Iterator[Part]:
    # It is sent by its name, without its attributes.
    if _sent(kind, reduces) is None:
        return
    name = named(kind)
    for key, value in vars(kind).items():
        yield Part(f"attribute {key!r} of the class {name}", value)


def _sent(owner: Any, reduces: Reduces) -> Any:
    """Return the state of a function or class that is sent; None if it is sent by its name."""
    reduced = reduces(owner)
    goes_by_value = isinstance(reduced, tuple) and len(reduced) > 2
    return reduced[2] if goes_by_value else None


def _parts_of_function(function: types.FunctionType, reduces: Reduces) -> Iterator[Part]:
    state = _sent(function, reduces)

    # It is sent by its name, without the objects that it uses.
    if state is None:
        return

    name = _named_function(function)
    for variable, value in state[1]["__globals__"].items():
        yield Part(f"global variable {variable!r} that {name} uses", value, is_global=True)
    yield from _captured_by(function, name)
    for variable, value in _defaults_of(function):
        yield Part(f"default of argument {variable!r} of {name}", value)
    for key, value in vars(function).items():
        yield Part(f"attribute {key!r} of {name}", value)


def _captured_by(function: types.FunctionType, name: str) -> Iterator[Part]:
    cells = function.__closure__ or ()
    for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield Part(f"variable {variable!r} that {name} captures", cell.cell_contents)


def _defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    last = positional[len(positional) - len(defaults) :]
    yield from zip(last, defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of *owner*, in its dictionary and its slots."""
    found: dict[str, Any] = {}
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        if isinstance(slots, str):
            slots = (slots,)
        for name in slots:
            with contextlib.suppress(AttributeError):  # not set yet
                found[name] = object.__getattribute__(owner, name)
    return {**found, **getattr(owner, "__dict__", {})}


def named(value: Any) -> str:
    """Return the name of the function or class *value*, with its cell if it is a notebook's."""
    if isinstance(value, functools.partial):
        return named(value.func)
    return _with_cell(entrypoint_name(value), _code_of(value))


def _code_of(value: Any) -> types.CodeType | None:
    """Return the code of *value*; for a class, that of its first method; None without any."""
    unwrapped = inspect.unwrap(value) if callable(value) else value
    code: Any = getattr(unwrapped, "__code__", None)
    if code is None:
        kind = value if isinstance(value, type) else type(value)
        return _code_in(kind)
    return code if isinstance(code, types.CodeType) else None


def _code_in(kind: type) -> types.CodeType | None:
    for each in vars(kind).values():
        # A static method or class method has its function inside.
        function = getattr(each, "__func__", each)
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            return code
    return None


def _named_function(function: types.FunctionType) -> str:
    """
    Return the name of *function* itself.

    It may be the wrapper of a decorator, with the name of the wrapped function.
    """
    code = function.__code__
    own_name = function.__qualname__.rpartition(".")[2]
    is_wrapper = hasattr(function, "__wrapped__") and code.co_name != own_name
    if is_wrapper:
        wrapper = _with_cell(code.co_name, code)
        return f"{wrapper}, which a decorator put around {entrypoint_name(function)},"
    return _with_cell(entrypoint_name(function), code)


def _with_cell(name: str, code: types.CodeType | None) -> str:
    if code is None:
        return name
    cell = cell_label(code.co_filename)
    return f"{name} ({cell})" if cell else name
