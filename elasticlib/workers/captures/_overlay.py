"""
What a program has changed of its script since its import: the variables that workers need beside an import of theirs.

Rules of this file: of what the script defines, only plain data is compared, and laid over the worker's own where it
differs; of what it does not define, all is sent; what cannot be sent is named.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

from elasticlib.errors import PicklingError
from elasticlib.workers.captures._main_script import ImportableMain, reached_globals
from elasticlib.workers.captures._parts import named
from elasticlib.workers.child.program._main import Incomplete, Withheld, is_namespace

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
    for name, value in reached_globals(functions, script.module.__dict__).items():
        is_defined = name in script.text.defined
        if is_defined and not script.text.may_change(name) and not is_plain(value):
            continue
        if script.is_own(value) and script.defines(value):
            continue
        try:
            try_to_send(value, script)
        except Exception as error:
            if script.text.surely_lacks(name):
                raise PicklingError(_refusal(name, value, functions, error)) from error
            found[name] = Incomplete(
                Withheld("") if name in script.text.redefined else _without_unsent(value, script, try_to_send),
                f"a {type(value).__qualname__}, it cannot be sent ({str(error) or type(error).__name__})",
            )
        else:
            found[name] = value
    return found


def is_plain(value: Any) -> bool:
    """Whether *value* is data that can be compared with another one: it is equal to more than itself."""
    if isinstance(value, (type, types.ModuleType)) or callable(value):
        return False
    equals: Any = type(value).__eq__
    return value is None or isinstance(value, enum.Enum) or equals is not object.__eq__


def _without_unsent(value: Any, script: ImportableMain, try_to_send: TryToSend, depth: int = _DEPTH) -> Any:
    """*value* with `Withheld` in the place of its parts that cannot be sent."""
    try:
        try_to_send(value, script)
    except Exception:
        kind = type(value)
        if depth and is_namespace(value):
            parts = {name: _without_unsent(each, script, try_to_send, depth - 1) for name, each in vars(value).items()}
            return kind(**parts)
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
