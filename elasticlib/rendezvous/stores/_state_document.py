"""
Keys and values in one text that is written whole. Pure.

    {"v": 1, "rev": 7, "keys": {path: [data, version, born]}, "held": {path: [ttl, renewals]}}

Rules of this file: a document never changes; each change makes another one. *rev* counts changes,
and is the version of the keys that a change wrote. Plain ASCII stays readable; other bytes are
base64 in a list.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Set
from json import dumps
from typing import Any

from attrs import evolve, frozen

from elasticlib import _untrusted
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.stores._keys import KeyFound

VERSION = 1


@frozen
class KeyLease:
    """A key that is deleted unless its holder renews it."""

    ttl: float
    """Seconds without a renewal after which others may take it."""
    renewals: int


@frozen
class Document:
    """All keys of one job."""

    rev: int = 0
    items: Mapping[str, KeyFound] = {}
    leases: Mapping[str, KeyLease] = {}

    def put(self, values: Mapping[str, bytes]) -> Document:
        """Return the document with these values, which all get one new version."""
        rev = self.rev + 1
        items = dict(self.items)
        for path, data in values.items():
            born = items[path].born if path in items else rev
            items[path] = KeyFound(path, data, rev, born)
        return evolve(self, rev=rev, items=items)

    def without(self, gone: Set[str]) -> Document:
        """Return the document without these keys."""
        return evolve(self.hiding(gone), rev=self.rev + 1) if gone & self.items.keys() else self

    def hiding(self, gone: Set[str]) -> Document:
        """Return a view of the document without these keys; nothing was changed."""
        items = {path: item for path, item in self.items.items() if path not in gone}
        return Document(self.rev, items, {path: lease for path, lease in self.leases.items() if path not in gone})

    def hold(self, path: str, token: bytes, ttl: float) -> Document:
        """Return the document with this key as a new and held one."""
        free = self.without({path}).put({path: token})
        return evolve(free, leases={**free.leases, path: KeyLease(ttl, 0)})

    def renew(self, path: str) -> Document:
        """Return the document with one more renewal of this held key; its version stays."""
        lease = self.leases[path]
        return evolve(self, rev=self.rev + 1, leases={**self.leases, path: evolve(lease, renewals=lease.renewals + 1)})

    def below(self, folder: str) -> set[str]:
        """Return the paths of all keys in the folder, at any depth."""
        return {path for path in self.items if path.startswith(f"{folder}/")}

    def encode(self) -> bytes:
        """Return the document as ASCII JSON."""
        body = {
            "v": VERSION,
            "rev": self.rev,
            "keys": {path: [_spelled(item.data), item.version, item.born] for path, item in self.items.items()},
            "held": {path: [lease.ttl, lease.renewals] for path, lease in self.leases.items()},
        }
        return dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_document(data: bytes) -> Document:
    """Return the document in *data*; raise `RendezvousStateError` for any other data."""
    try:
        body = _untrusted.parse(data)
        if body["v"] != VERSION:
            raise ValueError(
                f"its version is {_untrusted.shown(body['v'])}, but this node reads only version {VERSION}"
            )
        items = {
            path: KeyFound(path, _read(text), _count(version), _count(born))
            for path, (text, version, born) in body["keys"].items()
        }
        leases = {path: KeyLease(_seconds(ttl), _count(renewals)) for path, (ttl, renewals) in body["held"].items()}
        if not leases.keys() <= items.keys():
            raise ValueError("it lists a key that does not exist")
        return Document(_count(body["rev"]), items, leases)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RendezvousStateError(
            f"the rendezvous state {data[:80]!r} comes from another program, or from another version of elasticlib "
            f"({error!r}): give the job another --rdzv-id or endpoint"
        ) from error


def _spelled(data: bytes) -> str | list[str]:
    return data.decode("ascii") if data.isascii() else [base64.b64encode(data).decode("ascii")]


def _read(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("ascii")
    (text,) = value
    return base64.b64decode(text, validate=True)


def _count(value: Any) -> int:
    return _untrusted.whole(value, 0)


def _seconds(value: Any) -> float:
    found = _untrusted.seconds(value)
    if not found > 0:
        raise ValueError(f"{_untrusted.shown(value)} should be seconds above 0")
    return found
