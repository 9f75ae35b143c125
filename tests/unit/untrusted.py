"""Values of an untrusted writer: bytes, any JSON, and good values with one bad element."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NASTY_TEXTS = ("", "\ud800", "\ud800/1", "\x1b[2J", "a\nb", "\x00", "\u202e", "..", "a//b", "_", "x" * 5000)
NASTY_NUMBERS = (0, -1, 2**53, 2**63, -(2**63), 2**64, 10**400, 10**4000, 1e308, -1e308, 5e-324, 0.5)
NASTY_JSON = (
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"[" * 5000,
    b'{"a":' * 5000,
    b"1" * 5000,
    b"1e-999999999",
)
"""JSON texts that our code never writes."""
_MARK = "here goes what cannot be written otherwise"

scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(NASTY_NUMBERS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(NASTY_TEXTS)
    | st.text(st.characters(), max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
"""Any JSON value; half characters too, for JSON can hold them."""
strange = st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()) | st.sampled_from(NASTY_JSON)
"""Any bytes, most of them JSON."""


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a JSON value, the whole of it first."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from ((key, *rest) for rest in places(part))


def replaced(value: Any, place: tuple[Any, ...], part: Any) -> Any:
    """The value with another *part* at a place."""
    if not place:
        return part
    value = copy.copy(value)
    value[place[0]] = replaced(value[place[0]], place[1:], part)
    return value


def spoiled(good: bytes) -> st.SearchStrategy[bytes]:
    """The JSON value *good* with one part of it replaced by any other value, or left out, or called otherwise."""
    value = json.loads(good)
    at = st.sampled_from(sorted(places(value), key=len))
    other = st.builds(lambda place, part: json.dumps(replaced(value, place, part)).encode(), at, values)

    def written(place: tuple[Any, ...], raw: bytes) -> bytes:
        return json.dumps(replaced(value, place, _MARK)).encode().replace(json.dumps(_MARK).encode(), raw)

    return other | st.builds(written, at, st.sampled_from(NASTY_JSON))
