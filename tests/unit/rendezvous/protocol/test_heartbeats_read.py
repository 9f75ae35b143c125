"""Which heartbeats were read, in two characters a node."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.rendezvous.protocol._heartbeats_read import REPORT_MODULO, HeartbeatsRead

COUNTS = st.integers(1, 2**40)


@given(COUNTS, st.integers(0, REPORT_MODULO - 1), st.integers(0, 3))
def test_known_earlier_count_identifies_the_heartbeat_that_was_read(known: int, more: int, rank: int) -> None:
    counts = [0, 7, 0, 9]
    counts[rank] = known + more

    assert known + more == HeartbeatsRead.of(3, counts).count(rank, known)


@given(COUNTS, st.text(max_size=6), st.integers(0, 5))
def test_other_numbers_mean_none_or_one_not_below_the_known(known: int, text: str, rank: int) -> None:
    found = HeartbeatsRead(0, text).count(rank, known)

    assert found == -1 or known <= found < known + REPORT_MODULO


@pytest.mark.parametrize("last", ["", "a", "..", "a.", ".a", "\u00e9a"])
def test_invalid_number_means_that_no_heartbeat_was_read(last: str) -> None:
    assert -1 == HeartbeatsRead(0, last).count(0, 5)


def test_node_without_a_read_heartbeat_is_encoded_as_unread() -> None:
    assert HeartbeatsRead(4, "..ab..") == HeartbeatsRead.of(4, [0, 1, 0])
