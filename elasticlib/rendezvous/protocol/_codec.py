"""
How small frozen classes become JSON, and come back when nothing about them is wrong. Pure.

Rules of this file: it knows no message; a class is given by its fields, whose annotations name their readers. What
is not exactly as it should be is a ``ValueError`` that says what. Every text of a peer comes in by here, and is safe
to be shown from then on.
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
"""The spot where a message belongs; where it names that itself, what makes it of the message."""

Name: TypeAlias = str
"""A field that names somebody, in keys and signatures too; refused where it cannot be that."""
Lines: TypeAlias = str
"""A field of many lines for people. One that is annotated as ``str`` is a single line."""
Code: TypeAlias = str
"""A field that is compared, stands in keys and is never shown: it stays as it is."""


class Codec:
    """
    Encodes and decodes objects of *classes*, by the names under which they travel.

    *parts* are classes that occur in fields only. A field annotated ``Report`` holds an object of one of the
    *nested* classes, with its name.
    """

    def __init__(
        self, version: int, classes: Mapping[str, type[Any]], parts: Sequence[type[Any]], nested: Sequence[str]
    ) -> None:
        self._version = version
        self._classes = dict(classes)
        self._names = {cls: name for name, cls in classes.items()}
        self._nested = tuple(nested)
        readers = dict(PLAIN)
        for part in parts:
            read = functools.partial(self._of, part)
            readers |= {
                part.__name__: read,
                f"{part.__name__} | None": _or_none(read),
                f"tuple[{part.__name__}, ...]": _many(read),
            }
        readers["Report"] = self._read_nested
        every = (*classes.values(), *parts)
        # A peer of an earlier version does not know of a field that is new, and has a default.
        self._needed = {cls: {each.name for each in fields(cls) if each.default is NOTHING} for cls in every}
        self._fields = {cls: {each.name: readers[str(each.type)] for each in fields(cls)} for cls in every}

    def plain(self, message: Any) -> dict[str, Any]:
        """The object as plain data, with its name and the version."""
        body = asdict(message)
        if "report" in body:
            body["report"] = self.plain(message.report)
        return body | {"v": self._version, "type": self._names[type(message)]}

    def read(self, data: bytes, key: bytes | None, place: Place) -> Any:
        """The object that *data* holds, signed with *key* for *place* if there is a key, and unsigned if not."""
        return self.of(_untrusted.parse(data), key, place)

    def of(self, body: Any, key: bytes | None = None, place: Place = "") -> Any:
        """As `read`, of plain data."""
        if not isinstance(body, dict):
            raise ValueError("it is no JSON object")
        version = body.get("v")
        if type(version) is not int or version != self._version:
            raise ValueError(f"it has version {_untrusted.shown(version)}, this node reads version {self._version}")
        body = dict(body)
        signature = body.pop("mac", None)
        message = self._named(body, tuple(self._classes))
        _check(body, signature, key, place if isinstance(place, str) else place(message))
        return message

    def _named(self, body: dict[str, Any], allowed: tuple[str, ...]) -> Any:
        body = {name: value for name, value in body.items() if name != "v"}
        name = body.pop("type", None)
        if not isinstance(name, str) or name not in allowed:
            raise ValueError(f"its type {_untrusted.shown(name)} is unknown")
        return self._of(self._classes[name], body)

    def _read_nested(self, value: Any) -> Any:
        version = value.get("v") if isinstance(value, dict) else None
        if type(version) is not int or version != self._version:
            raise ValueError("the message holds no report of this version")
        return self._named(value, self._nested)

    def _of(self, cls: type[Any], body: Any) -> Any:
        readers = self._fields[cls]
        if not isinstance(body, dict) or not self._needed[cls] <= body.keys() <= readers.keys():
            raise ValueError(f"{cls.__name__} needs exactly the fields {', '.join(readers)}")
        return cls(**{name: readers[name](value) for name, value in body.items()})


def write(body: Any) -> bytes:
    """Plain data as canonical ASCII JSON."""
    return dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def key_of(token: str) -> bytes:
    """The key that a job's token stands for."""
    return hashlib.sha256(b"elasticlib job token\0" + token.encode()).digest()


def mac(data: bytes, key: bytes, place: str) -> str:
    """The signature for a place of what plain data look like."""
    return hmac.new(key, place.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _check(body: dict[str, Any], found: Any, key: bytes | None, place: str) -> None:
    if key is None:
        if found is not None:
            raise ValueError("it is signed, and this node has no token")
    elif not isinstance(found, str):
        raise ValueError("it is not signed, and this node has a token")
    elif not hmac.compare_digest(found.encode("utf-8", "replace"), mac(write(body), key, place).encode()):
        raise ValueError("its signature is of another token or another key")


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _many(read: Reader) -> Reader:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{_untrusted.shown(value)} should be a list")
        return tuple(read(item) for item in value)

    return read_all


def _code(value: Any) -> Any:
    text = _untrusted.exactly(value, str)
    try:
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
"""What reads a field, by its annotation."""
