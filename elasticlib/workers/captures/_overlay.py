"""
Changes that a program has made to its script since the import: the variables that workers need
beside their own import.

Rules of this file:

* A variable that the script defines is sent only if it is plain data that the program may have
  changed, by the script's text. It replaces the worker's own value if that differs.
* The import's own results for its process (a rank, a random number) stay each worker's own.
* All variables that the script does not define are sent. One that cannot be sent is named.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticlib.errors import PicklingError
from elasticlib.workers.captures._main_script import ImportableMain, ScriptText, reached_globals
from elasticlib.workers.captures._parts import named
from elasticlib.workers.child.program._main import CHANGED, IfAbsent, Incomplete, Withheld, is_namespace

TryToSend = Callable[[Any, ImportableMain], None]
"""Raises the reason why a value cannot be sent."""
_DEPTH = 20
"""Depth to which containers are searched for parts that cannot be sent."""


def of(script: ImportableMain, functions: Sequence[Any], try_to_send: TryToSend) -> dict[str, Any]:
    """
    Return the variables that *functions* of *script* use and that a worker's import may not have
    like that.

    The result is by name. Raise `PicklingError` for one that the import lacks and that cannot be
    sent.
    """
    found: dict[str, Any] = {}
    text = script.text
    for name, value in reached_globals(functions, script.module.__dict__).items():
        may_have_changed = _may_have_changed(name, value, text)

        # A worker's own import makes it, with that worker's content.
        if name in text.defined and not may_have_changed:
            continue

        # A function or class of the script is sent by its name.
        if script.defines(value) and script.is_own(value):
            continue
        try:
            try_to_send(value, script)
        except Exception as error:
            # No import makes this variable, so the function could not run.
            if text.surely_lacks(name):
                raise PicklingError(_refusal(name, value, functions, error)) from error
            found[name] = _incomplete(name, value, script, try_to_send, error)
        else:
            found[name] = value if may_have_changed else IfAbsent(value)

    return found


def _incomplete(name: str, value: Any, script: ImportableMain, try_to_send: TryToSend, error: Exception) -> Incomplete:
    """Return the stand-in for a variable that cannot be sent, and that the import may define."""
    if name in script.text.redefined:
        rest = CHANGED
    else:
        rest = _without_unsent(value, script, try_to_send)
    return Incomplete(rest, f"a {type(value).__qualname__}, it cannot be sent ({_reason(error)})")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def contents(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of *variables* that `of` has found, by name."""
    return {name: _content(value) for name, value in variables.items()}


def _content(value: Any) -> Any:
    if isinstance(value, (IfAbsent, Incomplete)):
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
        return Withheld(kind.__qualname__)

    def inner(part: Any) -> Any:
        return _without_unsent(part, script, try_to_send, depth - 1)

    if is_namespace(value):
        copy: Any = object.__new__(kind)
        vars(copy).update({name: inner(part) for name, part in vars(value).items()})
        return copy

    if kind is dict:
        return {key: inner(part) for key, part in value.items()}
    if kind in (list, tuple):
        return kind(map(inner, value))

    return Withheld(kind.__qualname__)


def _refusal(name: str, value: Any, functions: Sequence[Any], error: Exception) -> str:
    users = [each for each in functions if _mentions(each, name)]
    user = named(users[0] if users else functions[0])
    kind = type(value).__qualname__
    return (
        f"global variable {name!r} that {user} uses, a {kind}, is made behind the script's guard and "
        f"cannot be sent to the workers: {_reason(error)}; make it before the "
        "guard, where workers import it, or inside the function instead"
    )


def _mentions(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return name in getattr(code, "co_names", ())
