"""
The operations of the protocol on a store, as data: one class for each call of `Exchange`.

Rules of this file: an operation contains its arguments and no reason. `perform` does one; real
stores and the pure objects of the protocol share nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import frozen
from typing_extensions import assert_never

from elasticlib._untrusted import Refusals
from elasticlib.rendezvous.protocol._exchange import NOTHING, Exchange, Posted


@frozen
class Post:
    """Append an entry to the inbox, and write all *values*. Answer: None."""

    data: bytes
    values: Mapping[str, bytes] = NOTHING


@frozen
class Write:
    """Write all values. Answer: None."""

    values: Mapping[str, bytes]


@frozen
class Read:
    """Read the keys. Answer: a value or None for each."""

    keys: tuple[str, ...]


@frozen
class Wait:
    """Block until the key exists, for at most *timeout* seconds. Answer: whether it does."""

    key: str
    timeout: float


@frozen
class Update:
    """Write all *values*, then read *keys*. Answer: a value or None for each of these."""

    values: Mapping[str, bytes]
    keys: tuple[str, ...]


@frozen
class Take:
    """Read *key* once it exists, after at most *timeout* seconds. Answer: its value, or None."""

    key: str
    timeout: float


@frozen
class Delete:
    """Delete the keys. Answer: None."""

    keys: tuple[str, ...]


@frozen
class Receive:
    """
    Wait for entries of the inbox, for at most *timeout* seconds (None: no limit). Answer: the
    entries.
    """

    timeout: float | None


@frozen
class Discard:
    """Delete entries that were received. Answer: None."""

    entries: Sequence[Posted]


@frozen
class ClearForeign:
    """Delete every key of the workers, where they share the store. Answer: None."""


@frozen
class Log:
    """
    A line for people, not an operation of a store; *level* as in `logging`: ``"warning"``,
    ``"error"``.
    """

    level: str
    text: str


def refuse(refusals: Refusals, kind: str, why: object, now: float) -> tuple[Refusals, tuple[Log, ...]]:
    """Count a refusal; return the line for it, unless there were many of this *kind* lately."""
    refusals, line = refusals.refuse(kind, f"a {kind} was refused: {why}", now)
    return refusals, () if line is None else (Log("warning", line),)


Operation: TypeAlias = Post | Write | Read | Update | Wait | Take | Delete | Discard | ClearForeign
Result: TypeAlias = bool | list[bytes | None] | bytes | None


def perform(exchange: Exchange, operation: Operation) -> Result:
    """Perform the operation; raises the exceptions of *exchange*."""
    match operation:
        case Post(data, values):
            exchange.post(data, values)
        case Write(values):
            exchange.write(values)
        case Read(keys):
            return exchange.read(keys)
        case Update(values, keys):
            return exchange.update(values, keys)
        case Wait(key, timeout):
            return exchange.wait(key, timeout)
        case Take(key, timeout):
            return exchange.take(key, timeout)
        case Delete(keys):
            exchange.delete(keys)
        case Discard(entries):
            exchange.discard(entries)
        case ClearForeign():
            exchange.clear_foreign()
        case _:
            assert_never(operation)

    return None
