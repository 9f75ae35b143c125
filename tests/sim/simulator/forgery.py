"""
Data that an adversary without a token writes: old bytes with one change, noise, made-up messages.

Rules of this file: bytes in, bytes out. All chance is drawn from the given generator.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._messages import (
    LAST_EPOCH,
    Acknowledgement,
    Announcement,
    Close,
    CoordinatorHeartbeat,
    Descriptor,
    Envelope,
    Failed,
    FailureNote,
    Final,
    GivenUp,
    Join,
    Leave,
    Message,
    NodeHeartbeat,
    RankAssignment,
    RoundEnd,
    Stopped,
    Succeeded,
    Terms,
    encode,
)

_SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**400, 0.5, 1e308, 5e-324),
    *("", "n0/1", "\ud800", "\ud800/1", "\x1b[2J", "a\nb", "\x00", "\u202e", "..", "a//b", "x" * 5000),
    *([], {}, [[]], {"a": 1}, [None] * 3),
)
_RAW = (b"1e999", b"-1e999", b"NaN", b"Infinity", b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"1e-999999999")
"""Bytes that the encoding of our values never produces."""
_MARK = "here goes what cannot be written otherwise"
_SIGNED = b"signed:"
_OTHER_KEY = key_of("a guess")
_OFFER = Descriptor(1, "trainer", ("10.9.9.9",), 6666)
_NOTE = FailureNote(0, 0, 1, 1, "made up")
_TERMS = Terms(1, 4, 3)


def noise(chance: random.Random) -> bytes:
    """Any bytes."""
    return chance.choice((b"", b"null", b"{}", b"[]", chance.randbytes(chance.randrange(1, 60)), *_RAW))


def changed(chance: random.Random, good: bytes) -> bytes:
    """The JSON object *good* with one part of it replaced or left out; of what is none, its beginning."""
    head, body = _head(good)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return good[: chance.randrange(len(good) + 1)]
    return head + _written(chance, value)


def made_up(chance: random.Random, node: str, nonce: str) -> bytes:
    """A message that speaks of that node and beginning of the job: unsigned, or signed with a key that is a guess."""
    number = chance.choice((0, 1, 2, 3, 100, 2**31, 2**62 - 1))
    message = chance.choice(_messages(node, nonce, number))
    return encode(message) if chance.random() < 0.7 else encode(message, _OTHER_KEY, f"job/{nonce}/")


def _messages(node: str, nonce: str, number: int) -> tuple[Message, ...]:
    reports = (
        Join(node, _OFFER, None, number, min(number, LAST_EPOCH)), Join("n9/9", _OFFER, _TERMS),
        Failed(node, number, (_NOTE,)),
        Stopped(node, number, ()), Succeeded(node, number), Leave(node, "made up", number), Leave(node, "made up"),
        Acknowledgement(node), Close(node, "made up"),
    )  # fmt: skip
    return (
        *(Envelope(max(1, number), report) for report in reports),
        *(Final(True, "made up", round=number), Final(False, "made up"), GivenUp("made up")),
        *(RoundEnd(number, "made up", True), RoundEnd(number, "made up", False)),
        RankAssignment(number, 0, 1, 0, 1, 0, 1, 0, 3, ("10.9.9.9",), 6666, "made up"),
        *(Announcement("job", nonce, node, _TERMS, 10.0), Announcement("job", "another", node, _TERMS, 0.0)),
        *(
            CoordinatorHeartbeat(nonce, number),
            CoordinatorHeartbeat(nonce, number, over="made up"),
            CoordinatorHeartbeat("another", number),
        ),
        *(NodeHeartbeat(number), NodeHeartbeat(number, number, number), NodeHeartbeat(number, 0, number)),
    )


def _head(data: bytes) -> tuple[bytes, bytes]:
    """The signature of a document, if it has one, and its text."""
    if not data.startswith(_SIGNED):
        return b"", data
    head, mark, body = data[len(_SIGNED) :].partition(b":")
    return _SIGNED + head + mark, body


def _written(chance: random.Random, value: Any) -> bytes:
    place = chance.choice([*_places(value)])
    inner = _at(value, place)
    if isinstance(inner, str) and inner.startswith("{") and chance.random() < 0.8:
        # A document in a document.
        part: Any = changed(chance, inner.encode("utf-8", "replace")).decode("utf-8", "replace")
    elif isinstance(inner, int) and not isinstance(inner, bool) and chance.random() < 0.6:
        part = inner + chance.choice((-1, 1, 2, 10, 1000))
    elif place and chance.random() < 0.15:
        return json.dumps(_without(value, place)).encode()
    elif chance.random() < 0.3:
        return json.dumps(_with(value, place, _MARK)).encode().replace(json.dumps(_MARK).encode(), chance.choice(_RAW))
    else:
        part = chance.choice(_SCALARS)
    return json.dumps(_with(value, place, part)).encode()


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from ((key, *rest) for rest in _places(part))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _with(value: Any, place: tuple[Any, ...], part: Any) -> Any:
    if not place:
        return part
    value = copy.copy(value)
    value[place[0]] = _with(value[place[0]], place[1:], part)
    return value


def _without(value: Any, place: tuple[Any, ...]) -> Any:
    *way, last = place
    whole = copy.copy(_at(value, tuple(way)))
    del whole[last]
    return _with(value, tuple(way), whole)
