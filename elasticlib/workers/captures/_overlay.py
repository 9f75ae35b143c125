"""
What a program has changed of its script since its import: the variables that workers need beside an import of theirs.

Rules of this file: what the script defines is sent only where it is plain data that the program may have changed since,
by the script's text, and is laid over the worker's own where it differs: what an import makes of its process (a rank, a
random number) is each worker's own. Of what the script does not define, all is sent; what cannot be sent is named.
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
"""Raises what hinders a value from being sent."""
_DEPTH = 20
"""How deep containers are looked through for what cannot be sent."""


def of(script: ImportableMain, functions: Sequence[Any], try_to_send: TryToSend) -> dict[str, Any]:
    """
    The variables that *functions* of *script* reach and that a worker's import may lack, or have otherwise, by name.

    Raises `PicklingError` for one that it lacks and that cannot be sent.
    """
    found: dict[str, Any] = {}
    text = script.text
    for name, value in reached_globals(functions, script.module.__dict__).items():
        may_have_changed = _may_have_changed(name, value, text)
        if name in text.defined and not may_have_changed:
            continue
        if script.defines(value) and script.is_own(value):
            continue
        try:
            try_to_send(value, script)
        except Exception as error:
            if text.surely_lacks(name):
                raise PicklingError(_refusal(name, value, functions, error)) from error
            found[name] = Incomplete(
                CHANGED if name in text.redefined else _without_unsent(value, script, try_to_send),
                f"a {type(value).__qualname__}, it cannot be sent ({str(error) or type(error).__name__})",
            )
        else:
            found[name] = value if may_have_changed else IfAbsent(value)
    return found


def contents(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of *variables* that `of` has found, by name."""
    return {
        name: value.value if isinstance(value, (IfAbsent, Incomplete)) else value for name, value in variables.items()
    }


def _may_have_changed(name: str, value: Any, text: ScriptText) -> bool:
    """Whether what *name* holds may be another one, or have another content, than the import has given it."""
    return text.may_change(name) or (text.may_change_in_place(name) and is_plain(value) and not _is_constant(value))


def is_plain(value: Any) -> bool:
    """Whether *value* is data that can be compared with another one: it is equal to more than itself."""
    if isinstance(value, (type, types.ModuleType)) or callable(value):
        return False
    equals: Any = type(value).__eq__
    return value is None or isinstance(value, enum.Enum) or equals is not object.__eq__


def _is_constant(value: Any) -> bool:
    """Whether *value* never changes, or is a tensor, which a worker's own optimizers and views may refer to."""
    try:
        hash(value)
    except Exception:
        return False
    return True


def _without_unsent(value: Any, script: ImportableMain, try_to_send: TryToSend, depth: int = _DEPTH) -> Any:
    """*value* with `Withheld` in the place of its parts that cannot be sent."""
    try:
        try_to_send(value, script)
    except Exception:
        kind = type(value)
        if depth and is_namespace(value):
            parts = {name: _without_unsent(each, script, try_to_send, depth - 1) for name, each in vars(value).items()}
            made: Any = object.__new__(kind)
            vars(made).update(parts)
            return made
        if depth and kind is dict:
            return {key: _without_unsent(each, script, try_to_send, depth - 1) for key, each in value.items()}
        if depth and kind in (list, tuple):
            return kind(_without_unsent(each, script, try_to_send, depth - 1) for each in value)
        return Withheld(kind.__qualname__)
    return value


def _refusal(name: str, value: Any, functions: Sequence[Any], error: Exception) -> str:
    user = next((each for each in functions if name in getattr(getattr(each, "__code__", None), "co_names", ())), None)
    by = named(user or functions[0])
    return (
        f"global variable {name!r} that {by} uses, a {type(value).__qualname__}, is made behind the script's guard and "
        f"cannot be sent to the workers: {str(error) or type(error).__name__}; make it before the guard, where workers "
        "import it, or inside the function instead"
    )
