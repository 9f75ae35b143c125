"""
The exception of a worker as its launcher sees it: the very one where that can be, else what comes nearest to it.

Rules of this file: it reads only what `_results.pack_exception` wrote in a worker of this launcher; whatever cannot be
rebuilt here is left out, never raised; nothing heavy is imported.
"""

from __future__ import annotations

import builtins
import contextlib
import pickle
from typing import Any

from elasticlib.workers.child._report import qualified_name, text_of


def unpack(payload: bytes) -> BaseException | None:
    """What `_results.pack_exception` packed, or what comes nearest to it and has its text; None for other bytes."""
    parts = _loaded(payload)
    if not isinstance(parts, dict) or "whole" not in parts:
        return None
    whole = _loaded(parts["whole"])
    if isinstance(whole, BaseException):
        return whole
    args = tuple(_loaded(value) for value in parts.get("args", ()))
    found = {name: _loaded(value) for name, value in parts.get("fields", {}).items()}
    fields = {name: value for name, value in found.items() if value is not _MISSING}
    for kind in map(_loaded, parts.get("kinds", ())):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(Exception):
                return _rebuilt(kind, args, fields, parts["name"], parts["text"])
    return stand_in(parts["name"], parts["text"])


def stand_in(name: str, text: str) -> BaseException:
    """An exception that looks like one of class *name* with this *text*, of which nothing else is known."""
    kind = getattr(builtins, name, None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "exceptions")
    return _rebuilt(kind if known else Exception, (text,), {}, name, text)  # type: ignore[arg-type]


def _rebuilt(
    kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any], name: str, text: str
) -> BaseException:
    """An exception of *kind* without a call of its ``__init__``; of a class below it where *name* or *text* differ."""
    if qualified_name(kind) == name:
        error = _filled(kind, args, fields)
        if text_of(error) == text:
            return error
    module, _, plain = name.rpartition(".")
    looks = {"__module__": module or kind.__module__, "__str__": lambda self: text}
    return _filled(type(plain, (kind,), looks), args, fields)


def _filled(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


class ArgumentText(str):
    """The text of an argument that could not travel, which shows as that did."""

    __slots__ = ()
    __repr__ = str.__str__


class _Missing:
    """Stands for what cannot be rebuilt here."""

    def __repr__(self) -> str:
        return "<not sent>"


_MISSING = _Missing()


def _loaded(packed: Any) -> Any:
    """What was pickled, as far as that can be rebuilt here."""
    try:
        return pickle.loads(packed)
    except Exception:
        return _MISSING
