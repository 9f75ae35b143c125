"""
How a worker's return value or exception travels back: classes that both sides have keep their identity.

Rules of this file: an exception is for its launcher the very one where that can be, else what comes nearest to it;
what cannot be packed or rebuilt is left out, never raised; only what `pack_exception` wrote in a worker is unpacked.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import pickle
import types
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from elasticlib.workers.child import _own_modules
from elasticlib.workers.child._report import qualified_name, text_of_exception

_MOST_TWICE = 1 << 20
"""Bytes of a pickled exception whose parts are pickled too."""
_MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_OF_NOBODY = "obj"
"""What an `AttributeError` was looked for in may be anything, however large: Python does not pickle it either."""


def pack_result(value: Any, shared: Collection[str] | None) -> bytes:
    """Pickle what a worker sends back; *shared* names what the launcher has in its ``__main__`` too (None: all)."""
    buffer = io.BytesIO()
    if _own_modules.has_own("cloudpickle"):
        pickle.dump(value, buffer)  # what only this program has cannot travel then
    else:
        from elasticlib.workers.child import _by_value  # only here: a script that sends nothing does without it

        _by_value.ResultPickler(buffer, shared).dump(value)
    return buffer.getvalue()


def can_be_pickled(value: Any) -> bool:
    """Whether *value* can be pickled, and be rebuilt from that."""
    try:
        pickle.loads(pack_result(value, None))
    except Exception:
        return False
    return True


def pack_exception(error: BaseException, shared: Collection[str] | None) -> bytes:
    """
    Pickle an exception such that `unpack_exception` finds as much of it as can travel, whatever it holds.

    What cannot be pickled by itself, or not be rebuilt from that, is left out: a field, an argument for which its text
    goes, the class for which the nearest one above it goes.
    """
    text = text_of_exception(error)
    whole = _packed(error, shared) or b""
    there: dict[str, Any] = {}
    try:
        if whole:
            again = pickle.loads(whole)
            there = exception_members(again)
            if text_of_exception(again) != text:
                whole = b""  # its class makes something else of its arguments, as an ``__init__`` of its own may
    except Exception:
        whole = b""
    parts: dict[str, Any] = {"name": qualified_name(type(error)), "text": text, "whole": whole}
    if len(whole) <= _MOST_TWICE:  # its class may be missing over there
        fields = {name: _packed(value, shared) for name, value in vars(error).items()}
        parts["fields"] = {name: value for name, value in fields.items() if value is not None}
        held = {name: value for name, value in exception_members(error).items() if name not in there or not whole}
        more = {name: _packed(value, shared) for name, value in held.items() if name != _OF_NOBODY}
        parts["members"] = {name: value for name, value in more.items() if value is not None}
        parts["args"] = [_packed(value, shared) or _packed(ArgumentText(_shown(value)), shared) for value in error.args]
        kinds = [_packed(kind, shared) for kind in type(error).__mro__ if issubclass(kind, BaseException)]
        parts["kinds"] = [kind for kind in kinds if kind is not None]
    return pickle.dumps(parts)


def _packed(value: Any, shared: Collection[str] | None) -> bytes | None:
    """*value* pickled; None where it cannot be rebuilt even here."""
    try:
        packed = pack_result(value, shared)
        pickle.loads(packed)
    except Exception:
        return None
    return packed


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def unpack_exception(payload: bytes) -> BaseException | None:
    """What `pack_exception` packed, or what comes nearest to it and has its text; None for other bytes."""
    parts = _loaded(payload)
    if not isinstance(parts, dict) or "whole" not in parts:
        return None
    whole = _loaded(parts["whole"])
    more = {name: _loaded(value) for name, value in parts.get("members", {}).items()}
    if isinstance(whole, BaseException):
        set_exception_members(whole, more)
        return whole
    args = tuple(_loaded(value) for value in parts.get("args", ()))
    found = {name: _loaded(value) for name, value in parts.get("fields", {}).items()}
    fields = {name: value for name, value in found.items() if value is not _MISSING}
    for kind in map(_loaded, parts.get("kinds", ())):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(Exception):
                return _rebuilt(kind, args, fields, parts["name"], parts["text"], more)
    return stand_in(parts["name"], parts["text"])


def stand_in(name: str, text: str) -> BaseException:
    """An exception that looks like one of class *name* with this *text*, of which nothing else is known."""
    kind = getattr(builtins, name, None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "exceptions")
    return _rebuilt(kind if known else Exception, (text,), {}, name, text)  # type: ignore[arg-type]


def _rebuilt(
    kind: type[BaseException],
    args: tuple[Any, ...],
    fields: dict[str, Any],
    name: str,
    text: str,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> BaseException:
    """An exception of *kind* without a call of its ``__init__``; of a class below it where *name* or *text* differ."""
    if qualified_name(kind) == name:
        error = _filled(kind, args, fields, more)
        if text_of_exception(error) == text:
            return error
    module, _, plain = name.rpartition(".")
    looks = {"__module__": module or kind.__module__, "__str__": lambda self: text}
    return _filled(type(plain, (kind,), looks), args, fields, more)


def _filled(
    kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any], more: Mapping[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    set_exception_members(error, more)
    return error


def exception_members(error: BaseException) -> dict[str, Any]:
    """What *error* holds outside its ``__dict__``, such as `ImportError.name` and slots; not what all of them have."""
    found = {}
    for name, member in _members_of(type(error)).items():
        with contextlib.suppress(Exception):  # it was not set
            value = member.__get__(error, type(error))
            if value is not None:
                found[name] = value
    return found


def set_exception_members(error: BaseException, values: Mapping[str, Any]) -> None:
    """Have *error* hold what `exception_members` has told of another one, as far as its class has a place for it."""
    places = _members_of(type(error))
    for name, value in values.items():
        if name in places and value is not _MISSING:
            with contextlib.suppress(Exception):  # it can only be read
                places[name].__set__(error, value)


def _members_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each not in BaseException.__mro__:
            for name, value in vars(each).items():
                if isinstance(value, _MEMBERS) and not name.startswith("__"):
                    found.setdefault(name, value)
    return found


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
