"""
Pickles of a worker's return value or exception: classes that both sides have keep their identity.

Rules of this file: the launcher gets the same exception if possible, otherwise the nearest one.
Parts that cannot be packed or rebuilt are left out, and raise nothing. Only bytes that
`pack_exception` wrote in a worker are unpacked.
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
from elasticlib.workers.child._report import Report, qualified_name, report_of_exception, text_of_exception

_MOST_TWICE = 1 << 20
"""Most bytes of a pickled exception whose parts are pickled too."""
_MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_OF_NOBODY = "obj"
"""
The object that an `AttributeError` is about, of any kind and size: Python does not pickle it
either.
"""


def pack_result(value: Any, shared: Collection[str] | None) -> bytes:
    """
    Pickle the return value of a worker.

    *shared* names the definitions that the launcher has in its ``__main__`` too (None: all).
    """
    buffer = io.BytesIO()
    if _own_modules.has_own("cloudpickle"):
        # With a cloudpickle of the project's own, definitions of this program alone cannot be
        # sent.
        pickle.dump(value, buffer)
    else:
        # Imported here: a script that sends nothing needs no cloudpickle.
        from elasticlib.workers.child import _by_value

        _by_value.ResultPickler(buffer, shared).dump(value)

    return buffer.getvalue()


def can_be_pickled(value: Any) -> bool:
    """Return True if *value* can be pickled and rebuilt."""
    try:
        pickle.loads(pack_result(value, None))
    except Exception:
        return False
    return True


def unsendable(value: object, error: Exception) -> TypeError:
    """
    Return the error for a return *value* that `pack_result` could not pack, because of this
    *error*.
    """
    kind = qualified_name(type(value))
    return TypeError(f"the return value, a {kind}, cannot be pickled: {type(error).__name__}: {error}")


def report_of_failure(error: BaseException, shared: Collection[str] | None) -> Report:
    """Return the report of *error*, with as much of the exception itself as can be sent."""
    try:
        pickled = pack_exception(error, shared)
    except Exception:
        # The report without it still has the type, the text and the traceback.
        pickled = b""
    return report_of_exception(error, pickled)


def pack_exception(error: BaseException, shared: Collection[str] | None) -> bytes:
    """
    Pickle an exception such that `unpack_exception` restores as much of it as can be sent.

    Parts that cannot be pickled alone, or not be rebuilt, are left out or replaced. An argument
    is replaced by its text, a class by the nearest one above it. A field is left out.
    """
    text = text_of_exception(error)
    whole, members_of_whole = _packed_whole(error, text, shared)
    parts: dict[str, Any] = {"name": qualified_name(type(error)), "text": text, "whole": whole}

    # The class may be missing in the launcher, which then rebuilds the exception from its parts.
    if len(whole) <= _MOST_TWICE:
        members = {name: value for name, value in exception_members(error).items() if name not in members_of_whole}
        members.pop(_OF_NOBODY, None)
        parts["fields"] = _all_packed(vars(error), shared)
        parts["members"] = _all_packed(members, shared)
        parts["args"] = [_packed_argument(value, shared) for value in error.args]
        parts["kinds"] = _packed_kinds(type(error), shared)

    return pickle.dumps(parts)


def _packed_whole(error: BaseException, text: str, shared: Collection[str] | None) -> tuple[bytes, Collection[str]]:
    """Pickle *error* itself, and return the names of its members; empty if it cannot be sent."""
    whole = _packed(error, shared)
    if whole is None:
        return b"", ()

    try:
        again = pickle.loads(whole)
        members = exception_members(again)
        has_same_text = text_of_exception(again) == text
    except Exception:
        return b"", ()

    if not has_same_text:
        # Its class changes its arguments, as an ``__init__`` of its own may.
        return b"", ()

    return whole, members.keys()


def _packed_kinds(kind: type[BaseException], shared: Collection[str] | None) -> list[bytes]:
    """Pickle the class of an exception and those above it, as far as these can be sent."""
    found = []
    for each in kind.__mro__:
        packed = _packed(each, shared) if issubclass(each, BaseException) else None
        if packed is not None:
            found.append(packed)
    return found


def _packed_argument(value: Any, shared: Collection[str] | None) -> bytes | None:
    return _packed(value, shared) or _packed(ArgumentText(_shown(value)), shared)


def _all_packed(values: Mapping[str, Any], shared: Collection[str] | None) -> dict[str, bytes]:
    """Pickle each of *values*; leave out those that cannot be sent."""
    found = {}
    for name, value in values.items():
        packed = _packed(value, shared)
        if packed is not None:
            found[name] = packed
    return found


def _packed(value: Any, shared: Collection[str] | None) -> bytes | None:
    """Pickle *value*; return None if it cannot be rebuilt even here."""
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
    """
    Return the exception that `pack_exception` packed, or the nearest one with its text.

    None for other bytes.
    """
    parts = _loaded(payload)
    if not isinstance(parts, dict) or "whole" not in parts:
        return None

    whole = _loaded(parts["whole"])
    members = _all_loaded(parts.get("members", {}))
    if isinstance(whole, BaseException):
        set_exception_members(whole, members)
        return whole

    args = tuple(map(_loaded, parts.get("args", ())))
    fields = _all_loaded(parts.get("fields", {}))
    for kind in map(_loaded, parts.get("kinds", ())):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            # This class cannot be made with these arguments: the next one above it may.
            with contextlib.suppress(Exception):
                return _rebuilt(kind, args, fields, parts["name"], parts["text"], members)

    return stand_in(parts["name"], parts["text"])


def _all_loaded(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild each value; leave out those that cannot be rebuilt here."""
    loaded = {name: _loaded(value) for name, value in packed.items()}
    return {name: value for name, value in loaded.items() if value is not _MISSING}


def stand_in(name: str, text: str) -> BaseException:
    """
    Return an exception that looks like one of class *name* with this *text*, and has nothing
    else.
    """
    found: Any = getattr(builtins, name, None)
    is_exception = isinstance(found, type) and issubclass(found, Exception)
    # A group cannot be made without the exceptions in it.
    is_usable = is_exception and not hasattr(found, "exceptions")
    kind = found if is_usable else Exception
    return _rebuilt(kind, (text,), {}, name, text)


def _rebuilt(
    kind: type[BaseException],
    args: tuple[Any, ...],
    fields: dict[str, Any],
    name: str,
    text: str,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> BaseException:
    """
    Return an exception of *kind* without a call of its ``__init__``.

    Its class is a new one below *kind* if *name* or *text* differ.
    """
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
    """
    Return the values that *error* holds outside its ``__dict__``, such as `ImportError.name` and
    slots.

    Those that all exceptions have are left out.
    """
    found = {}
    for name, member in _members_of(type(error)).items():
        with contextlib.suppress(Exception):
            # The member was not set.
            value = member.__get__(error, type(error))
            if value is not None:
                found[name] = value
    return found


def set_exception_members(error: BaseException, values: Mapping[str, Any]) -> None:
    """Set the *values* that `exception_members` found in another exception, if the class has them."""
    places = _members_of(type(error))
    for name, value in values.items():
        if name not in places or value is _MISSING:
            continue
        with contextlib.suppress(Exception):
            # The member can only be read.
            places[name].__set__(error, value)


def _members_of(kind: type) -> dict[str, Any]:
    """Return the descriptors of *kind* and the classes above it, up to `BaseException`, by name."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each in BaseException.__mro__:
            continue
        for name, value in vars(each).items():
            if isinstance(value, _MEMBERS) and not name.startswith("__"):
                found.setdefault(name, value)
    return found


class ArgumentText(str):
    """Text of an argument that could not be sent; it is shown like the argument."""

    __slots__ = ()
    __repr__ = str.__str__


class _Missing:
    """Stand-in for a value that cannot be rebuilt here."""

    def __repr__(self) -> str:
        return "<not sent>"


_MISSING = _Missing()


def _loaded(packed: Any) -> Any:
    """Return the value that was pickled; a stand-in if it cannot be rebuilt here."""
    try:
        return pickle.loads(packed)
    except Exception:
        return _MISSING
