"""Messages between nodes in the store of a third-party handler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._messages import Descriptor, Final, Join, RankAssignment, Stopped, encode
from elasticlib.rendezvous.third_party._agreement import Agreement, Past
from tests.unit.untrusted import spoiled, strange

JOIN = Join("a/1", Descriptor(1, "trainer", ("127.0.0.1",), 1))
NUMBERS = st.sampled_from([b"0", b"-1", b"7", b"-2", b"1e9", b"9" * 18, b"9" * 5000, b"\xd9\xa3", b""])


class Store(dict[str, bytes]):
    """As much of a store as an agreement needs."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@given(
    strange
    | st.builds(lambda *parts: b" ".join(parts), NUMBERS, NUMBERS, st.just(encode(JOIN)) | spoiled(encode(JOIN)))
)
@example(b"-1 -1 " + encode(JOIN))
def test_any_offer_of_a_node_yields_ranks_or_is_refused(offer: bytes) -> None:
    store: Any = Store()
    table = Agreement(store, 0, 2, lambda call: call())
    table.meet(JOIN, Past(), 3)
    store.set(f"elasticlib/{table.nonce}/offer/1", offer)
    try:
        assignment = table.meet(JOIN, Past(), 3)
    except RendezvousStateError as error:
        assert len(str(error)) < 1000
        return
    assert isinstance(assignment, RankAssignment)


@given(strange, st.sampled_from(["seat/a/1", "ended", "gone/0", "final"]))
def test_invalid_message_is_refused(data: bytes, key: str) -> None:
    store: Any = Store()
    table = Agreement(store, 0, 1, lambda call: call(), "nonce", assigned=True)
    store.set(f"elasticlib/nonce/{key}", data)

    with pytest.raises(RendezvousStateError):
        read = {
            "ended": table.ended,
            "final": lambda: table.read(Final, "final"),
            "gone/0": lambda: table.read(Stopped, "gone/0"),
        }
        read.get(key, lambda: table.meet(JOIN, Past(), 3))()
