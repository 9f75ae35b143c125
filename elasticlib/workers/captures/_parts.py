"""
The parts of a call that are sent with it, and their names: arguments, variables, defaults,
attributes. `refusal` names the part that cannot be sent.

Rules of this file: only the pickler decides what is sent of a function or class, and nothing else
counts as a part. A name describes the part, its function, and its cell. The search for a part that
cannot be sent copies nothing large. If it does not find the part, it says so rather than name
another.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pickle
import textwrap
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
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_LONGEST = 200
"""Characters of a cause."""
_LONGEST_PLACE = 60
"""Characters of the place within a part."""


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
                yield Part(f"attribute {key!r} of the {kind} object whose method {name} is called", value)
        elif not isinstance(function, _CALLED_BY_NAME):
            for key, value in attributes(function).items():
                yield Part(f"attribute {key!r} of the called {name} object", value)


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
            # Not by `getattr`, which may run the user's code.
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


# The part that cannot be pickled, by the pickler's path to it: it is searched only after pickling has
# failed.


class _Nowhere:
    def write(self, data: object) -> int:
        return 0


class _Way(pickle._Pickler):
    """Pickles to nowhere, by Python's own code, and records its path."""

    def __init__(self, pickler: Any) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
        self.dispatch_table = pickler.dispatch_table
        self.reducer_override: Reduces = pickler.reducer_override
        self.links: list[Any] = []
        """Path from the pickled object to the part that is being pickled."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        # These have no parts, and can always be sent.
        if type(obj) in _PLAIN:
            return
        self.links.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.links.pop()


def refusal(
    call: CapturedCall, error: Exception, pickler: Any, dumps: Callable[[Any], object], *, is_of_script: bool = False
) -> str:
    """
    Return why *call* cannot be sent; *error* does not name the part.

    *pickler* is a fresh one of the kind that raised it, and *dumps* tries another such pickler.
    *is_of_script*: workers could import the program's script, if it had a guard.
    """
    name = named(call.function)
    links, cause = _way_to_failure(call, pickler)

    # Python's own pickler recurses less deep than the other one.
    if cause is None or isinstance(cause, RecursionError):
        cause = error
        found = _deep(call, links, pickler.reducer_override, dumps)
    else:
        found = _blamed(call, links, pickler.reducer_override)

    if found is None:
        return f"{name} cannot be sent to the workers: {_text(error, with_kind=True)}"

    part = found.part
    kind = type(part.value).__qualname__
    beside = _beside(name, found.owners)
    at = f"at {found.place}, " if found.place else ""
    instead = _way_out(part, is_of_script=is_of_script)
    return f"{part.name}, a {kind}, cannot be sent to the workers{beside}: {at}{_text(cause)}; {instead}"


def _beside(name: str, owners: Sequence[Any]) -> str:
    """
    Return the call with which a part is sent, if the part's name does not show it, and the
    *owners* between.
    """
    names = dict.fromkeys(map(named, owners))
    between = [each for each in names if each != name]
    if not between:
        return ""
    # The name of the part already has the last one.
    on_the_way = between[:-1]
    if not on_the_way:
        return f" with {name}"
    return f" with {name} (by way of {', '.join(on_the_way)})"


def _way_out(part: Part, *, is_of_script: bool) -> str:
    inside = "make it inside the function instead"
    if is_of_script and part.is_global:
        return f"put the launch under `if __name__ == '__main__':`, so that workers import the script, or {inside}"
    return inside


def _way_to_failure(call: CapturedCall, pickler: Any) -> tuple[list[Any], Exception | None]:
    """
    Return the path on which pickling fails, and the reason; an empty path and None without a
    failure.
    """
    way = _Way(pickler)
    try:
        way.dump(call.sent)
    except Exception as error:
        # Its traceback would keep all pickled objects.
        return way.links, error.with_traceback(None)
    return [], None


def _text(error: Exception, *, with_kind: bool = False) -> str:
    kind = type(error).__name__
    text = f"{kind}: {error}" if with_kind else str(error) or kind
    return textwrap.shorten(text, _LONGEST, placeholder=" ...")


@frozen(eq=False)
class _Found:
    """A part that cannot be pickled."""

    part: Part
    place: str = ""
    """The place within it; empty if it adds nothing."""
    owners: Sequence[Any] = ()
    """The functions and classes on the path to it."""


def _blamed(call: CapturedCall, links: Sequence[Any], reduces: Reduces) -> _Found | None:
    """Return the part that fails: the last of *links* that has a name."""
    way = [call, *links[1:]]
    owners = [index for index, link in enumerate(way) if is_owner(link)]
    while owners:
        owner = owners[-1]
        behind = way[owner + 1 :]
        index, part = _first_part(behind, way[owner], reduces)
        if part is not None:
            passed = [way[each] for each in owners[1:]]
            return _Found(part, _place(behind[index:]), passed)
        owners.pop()

    return None


def _first_part(links: Sequence[Any], owner: Any, reduces: Reduces) -> tuple[int, Part | None]:
    """Return the first of *links* that is a part of *owner*, with its index."""
    parts = {id(part.value): part for part in parts_of(owner, reduces)}
    for index, link in enumerate(links):
        if id(link) in parts:
            return index, parts[id(link)]
    return -1, None


def _deep(call: CapturedCall, links: Sequence[Any], reduces: Reduces, dumps: Callable[[Any], object]) -> _Found | None:
    """Return the part that *dumps* cannot send alone: the one on the path, or an argument."""
    on_the_way = _blamed(call, links, reduces) if links else None
    if on_the_way is not None and not _can_be_sent(on_the_way.part, dumps):
        return _Found(on_the_way.part, owners=on_the_way.owners)
    for part in (*call.arguments(), *call.attributes()):
        if not _can_be_sent(part, dumps):
            return _Found(part)
    return None


def _can_be_sent(part: Part, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(part.value)
    except Exception:
        return False
    return True


def _place(links: Sequence[Any]) -> str:
    """
    Return the place of the last of *links* in the first one, in Python's notation.

    Empty if it adds nothing.
    """
    text = ""

    # An object whose attributes follow: the objects between them are its state, not a place of
    # their own.
    owner = None
    for before, link in itertools.pairwise(links):
        if isinstance(before, dict):
            text += _place_in_dict(before, link, owner)
            owner = None
        elif owner is not None:
            continue
        elif isinstance(before, (list, tuple)):
            text += f"[{_index_of(link, before)}]"
        else:
            owner = before

    return text if len(text) <= _LONGEST_PLACE else f"{text[:_LONGEST_PLACE]}..."


def _place_in_dict(items: dict[Any, Any], link: Any, owner: object) -> str:
    """Return the place of *link* in *items*, which may be the attributes of *owner*."""
    key = next((key for key, value in items.items() if value is link), None)
    # It is a key of the dictionary, not a value.
    if key is None:
        return ""
    if owner is None:
        return f"[{key!r}]"
    is_attribute = isinstance(key, str) and attributes(owner).get(key) is link
    return f".{key}" if is_attribute else ""


def _index_of(link: Any, items: Sequence[Any]) -> int | str:
    return next((index for index, value in enumerate(items) if value is link), "")
