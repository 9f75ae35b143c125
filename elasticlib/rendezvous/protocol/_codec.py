"""
JSON for small frozen classes, checked when it is read. Pure.

Rules of this file: it knows no message; a class is given by its fields, whose annotations name
their readers. Any deviation is a ``ValueError`` that names it. Every text of a peer is read here,
and is safe to be shown from then on.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any, TypeAlias

from attrs import NOTHING, asdict, fields

from elasticlib import _untrusted

Reader: TypeAlias = Callable[[Any], Any]
Place: TypeAlias = str | Callable[[Any], str]
"""
The place where a message belongs; or a function that makes it from a message that names it itself.
"""

Name: TypeAlias = str
"""A field with a name, also used in keys and signatures; refused if it is not a valid name."""
Lines: TypeAlias = str
"""A field of many lines for people. One that is annotated as ``str`` is a single line."""
Code: TypeAlias = str
"""A field that is compared, used in keys and never shown: it is not changed."""


class Codec:
    """
    Encodes and decodes objects of *classes*, by their names on the wire.

    *parts* are classes that occur in fields only. A field annotated ``Report`` holds an object of
    one of the *nested* classes, with its name.
    """

    def __init__(
        self, version: int, classes: Mapping[str, type[Any]], parts: Sequence[type[Any]], nested: Sequence[str]
    ) -> None:
        self._version = version
        self._classes = dict(classes)
        self._names = {cls: name for name, cls in classes.items()}
        self._nested = tuple(nested)
        readers = self._readers(parts)
        self._fields: dict[type[Any], dict[str, Reader]] = {}
        self._needed: dict[type[Any], set[str]] = {}
        for cls in (*classes.values(), *parts):
            self._fields[cls] = {each.name: readers[str(each.type)] for each in fields(cls)}
            # A peer of an earlier version does not know a new field, which therefore has a default.
            self._needed[cls] = {each.name for each in fields(cls) if each.default is NOTHING}

    def _readers(self, parts: Sequence[type[Any]]) -> dict[str, Reader]:
        """Return the reader of each field's annotation."""
        readers = dict(PLAIN)
        for part in parts:
            read = functools.partial(self._of, part)
            readers[part.__name__] = read
            readers[f"{part.__name__} | None"] = _or_none(read)
            readers[f"tuple[{part.__name__}, ...]"] = _many(read)
        readers["Report"] = self._read_nested
        return readers

    def plain(self, message: Any) -> dict[str, Any]:
        """Return the object as plain data, with its name and the version."""
        body = asdict(message)
        # asdict loses the class of nested objects: its name must be written beside it.
        if "report" in body:
            body["report"] = self.plain(message.report)
        return body | {"v": self._version, "type": self._names[type(message)]}

    def read(self, data: bytes, key: bytes | None, place: Place) -> Any:
        """Return the object in *data*, signed with *key* for *place*; unsigned if *key* is None."""
        return self.of(_untrusted.parse(data), key, place)

    def of(self, body: Any, key: bytes | None = None, place: Place = "") -> Any:
        """Do the same as `read`, with plain data."""
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")

        version = body.get("v")
        is_ours = type(version) is int and version == self._version  # True equals 1, but is not a version
        if not is_ours:
            raise ValueError(
                f"its version is {_untrusted.shown(version)}, but this node reads only version {self._version}"
            )

        body = dict(body)
        signature = body.pop("mac", None)

        # Before the signature, since the place may depend on the message: it is not used until
        # then.
        message = self._named(body, tuple(self._classes))
        if not isinstance(place, str):
            place = place(message)
        _check(body, signature, key, place)
        return message

    def _named(self, body: dict[str, Any], allowed: tuple[str, ...]) -> Any:
        body = dict(body)
        body.pop("v", None)
        name = body.pop("type", None)
        if not isinstance(name, str) or name not in allowed:
            raise ValueError(f"its type {_untrusted.shown(name)} is unknown")
        return self._of(self._classes[name], body)

    def _read_nested(self, value: Any) -> Any:
        version = value.get("v") if isinstance(value, dict) else None
        is_ours = type(version) is int and version == self._version
        if not is_ours:
            raise ValueError(f"it contains no report of version {self._version}")
        return self._named(value, self._nested)

    def _of(self, cls: type[Any], body: Any) -> Any:
        readers = self._fields[cls]
        has_its_fields = isinstance(body, dict) and self._needed[cls] <= body.keys() <= readers.keys()
        if not has_its_fields:
            raise ValueError(f"{cls.__name__} has a missing or unknown field: its fields are {', '.join(readers)}")
        return cls(**{name: readers[name](value) for name, value in body.items()})


def write(body: Any) -> bytes:
    """Return plain data as canonical ASCII JSON."""
    return dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def key_of(token: str) -> bytes:
    """Return the key that a job's token stands for."""
    return hashlib.sha256(b"elasticlib job token\0" + token.encode()).digest()


def mac(data: bytes, key: bytes, place: str) -> str:
    """Return the signature of *data*, which `write` made, for a place."""
    # The place is covered, too, so that a copy of a signed message is worthless elsewhere.
    return hmac.new(key, place.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _check(body: dict[str, Any], found: Any, key: bytes | None, place: str) -> None:
    """Raise ValueError unless the signature *found* is that of *key* for *place*."""
    if key is None:
        if found is not None:
            raise ValueError("it is signed, but this node has no token")
        return

    if not isinstance(found, str):
        raise ValueError("it is not signed, but this node has a token")

    expected = mac(write(body), key, place).encode()

    # In constant time: the duration must not show how much of a signature was right.
    if not hmac.compare_digest(found.encode("utf-8", "replace"), expected):
        raise ValueError("it was signed with another token, or for another key of the store")


def _or_none(read: Reader) -> Reader:
    def read_or_none(value: Any) -> Any:
        if value is None:
            return None
        return read(value)

    return read_or_none


def _many(read: Reader) -> Reader:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{_untrusted.shown(value)} should be a list")
        return tuple(read(item) for item in value)

    return read_all


def _code(value: Any) -> Any:
    text = _untrusted.exactly(value, str)
    try:
        # A lone surrogate would make the key or the signature fail later, in other people's code.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_untrusted.shown(value)} holds half of a character") from None
    return text


PLAIN: Mapping[str, Reader] = {
    "int": _untrusted.whole,
    "str": _untrusted.line,
    "Lines": _untrusted.lines,
    "Name": _untrusted.name,
    "Code": _code,
    "bool": functools.partial(_untrusted.exactly, kind=bool),
    "float": _untrusted.seconds,
    "int | None": _or_none(_untrusted.whole),
    "float | None": _or_none(_untrusted.seconds),
    "Name | None": _or_none(_untrusted.name),
    "tuple[str, ...]": _many(_untrusted.line),
}
"""The reader of a field, by its annotation."""
